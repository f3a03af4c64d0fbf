# SPDX-License-Identifier: Apache-2.0
"""The global scheduler: which instance holds which prefix, how busy each is, which one serves a request."""
