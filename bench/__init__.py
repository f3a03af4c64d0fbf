"""Benchmarks. Each prints one table, its command, the machine, and the reference it is measured against."""
