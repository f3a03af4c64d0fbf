# SPDX-License-Identifier: Apache-2.0
"""The existing package's programs under their names: their flags, ports and log lines around our roles."""
