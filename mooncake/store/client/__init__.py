"""The client of the store: blocking and asyncio interfaces, operations, and state between calls."""
