"""The existing package's surface and nothing else: its store, engine, master's HTTP side and programs."""
