# SPDX-License-Identifier: Apache-2.0
"""Admission: whether a request is accepted, refused early or refused late, and shadow prices."""
