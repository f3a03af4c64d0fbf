# SPDX-License-Identifier: Apache-2.0
"""The HTTP edge that every server shares: listening, limits, API shapes and server-sent events."""
