"""High availability: leader election, standby replication, and how clients find the leading master."""
