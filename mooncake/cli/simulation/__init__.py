# SPDX-License-Identifier: Apache-2.0
"""Commands for "what if" questions: simulate a trace on virtual time, and find a cluster that suffices.

What runs is ``mooncake.sim``; this package only parses the options and presents the results.
"""
