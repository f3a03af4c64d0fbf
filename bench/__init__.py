# SPDX-License-Identifier: Apache-2.0
"""Benchmarks. Each prints one table, its command, the machine, and the reference it is measured against."""
