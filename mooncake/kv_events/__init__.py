# SPDX-License-Identifier: Apache-2.0
"""KV events: their types and dialects, and the sockets over which they are published."""
