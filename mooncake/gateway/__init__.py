# SPDX-License-Identifier: Apache-2.0
"""The gateway: the OpenAI API for clients, and each request's path from prefill to decode."""
