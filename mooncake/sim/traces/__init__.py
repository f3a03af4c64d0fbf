# SPDX-License-Identifier: Apache-2.0
"""Traces of requests: recorded in files of several formats, or generated from a description."""
