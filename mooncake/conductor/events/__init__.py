"""KV events of engines and of the pool: subscription, dialects, application to the index."""
