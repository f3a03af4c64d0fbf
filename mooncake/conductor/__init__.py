"""The global scheduler: which instance holds which prefix, how busy each is, who serves a request."""
