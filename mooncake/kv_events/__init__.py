"""KV events: their types and dialects, and the sockets over which they are published."""
