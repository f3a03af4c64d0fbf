"""Admission: whether a request is accepted, refused early or refused late, and shadow prices."""
