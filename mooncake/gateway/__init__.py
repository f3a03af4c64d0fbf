"""The door: the OpenAI API for clients, and behind it the walk from prefill to decode."""
