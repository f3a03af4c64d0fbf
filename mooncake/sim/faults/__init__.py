# SPDX-License-Identifier: Apache-2.0
"""Deterministic simulation of the cores under faults that a seed draws: worlds, workloads and invariants."""
