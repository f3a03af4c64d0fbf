# SPDX-License-Identifier: Apache-2.0
"""Scheduling policies: how the instances for a request are chosen."""
