"""Deterministic simulation of the cores under faults that a seed draws: worlds, workloads and invariants."""
