# SPDX-License-Identifier: Apache-2.0
"""The client of the store: blocking and asyncio interfaces, operations, and state between calls."""
