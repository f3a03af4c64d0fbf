# SPDX-License-Identifier: Apache-2.0
"""Predictions compared with measurements on GPUs."""
