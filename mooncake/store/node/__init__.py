"""A node: the memory and SSD it mounts, and the tasks it carries out for the master."""
