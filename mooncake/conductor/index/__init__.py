# SPDX-License-Identifier: Apache-2.0
"""The global prefix index: which instance and which tier holds which block."""
