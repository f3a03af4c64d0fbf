"""Predictions of queueing, transfer, prefill and decode times, and their accuracy."""
