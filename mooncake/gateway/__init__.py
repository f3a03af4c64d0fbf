"""The gateway: the OpenAI API for clients, and each request's path from prefill to decode."""
