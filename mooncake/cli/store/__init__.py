# SPDX-License-Identifier: Apache-2.0
"""``mooncake store``: the store on the command line and in scripts (``--json``)."""
