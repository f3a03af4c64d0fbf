# SPDX-License-Identifier: Apache-2.0
"""KV events of engines and of the pool: subscription, translation of block hashes, use in the index."""
