# SPDX-License-Identifier: Apache-2.0
"""A node: the memory, SSD and device pools that it mounts, and the tasks that it runs for the master."""
