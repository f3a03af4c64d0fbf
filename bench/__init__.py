"""Benchmarks. Each prints one table, its own command, the machine, and the reference it is measured against."""
