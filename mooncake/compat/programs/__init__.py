"""The existing package's programs by their names: their flags, ports and log lines around our roles."""
