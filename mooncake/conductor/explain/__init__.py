# SPDX-License-Identifier: Apache-2.0
"""Explanations: why a request was placed where it was, and why each of its blocks was missed."""
