"""``mooncake store``: the store on the command line and in scripts (``--json``)."""
