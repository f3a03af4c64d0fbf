# SPDX-License-Identifier: Apache-2.0
"""High availability: leader election, standby replication, and how clients find the leading master."""
