"""``mooncake store``: the store for people at a terminal, and for their scripts (``--json``)."""
