# SPDX-License-Identifier: Apache-2.0
"""The master's core: objects, segments and tenants, and every rule about them. No I/O but the log on disk."""
