# SPDX-License-Identifier: Apache-2.0
"""The existing package's surface and nothing else: its store, engine, master's HTTP side and programs."""
