# SPDX-License-Identifier: Apache-2.0
"""The surface of the existing package's ``mooncake.store``, on this store.

Programs written for that package keep their calls and their numbers. Where it returns a bare number,
the reason is logged here (logger ``mooncake.store``); where it crashed, blocked or ignored an error,
this one returns an error. ``docs/store.md`` lists what differs. ``store.py`` composes the class, every call
goes through ``lifecycle.py``, and ``error_codes.py`` is the table of numbers.
"""
