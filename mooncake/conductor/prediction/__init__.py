# SPDX-License-Identifier: Apache-2.0
"""Predictions of queueing, transfer, prefill and decode times, and their accuracy."""
