# SPDX-License-Identifier: Apache-2.0
"""Why prompts missed: their nearest siblings, the differences, what these cost, and rules that avoid them."""
