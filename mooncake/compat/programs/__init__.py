"""The existing package's programs under their names: their flags, ports and log lines around our roles."""
