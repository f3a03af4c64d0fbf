"""Scheduling policies: how the instances for a request are chosen."""
