"""Traces of requests: recorded in files of several formats, or generated from a description."""
