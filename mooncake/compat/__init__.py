# SPDX-License-Identifier: Apache-2.0
"""The existing package's surface and nothing else: its store, engine, master's HTTP side and programs."""

import inspect


def public_in(module: str, *types: type) -> None:
    """Name the types by the module from which programs import them, also in repr and pickles."""
    for one in types:
        one.__module__ = module


def name_methods(composed: type) -> None:
    """Name the methods of ``composed`` by it, also those of its parts, which its users do not know.

    Python's TypeErrors for missing and unknown arguments contain these names.
    """
    for part in composed.__mro__:
        for name, method in vars(part).items():
            if inspect.isfunction(method):
                method.__qualname__ = f"{composed.__qualname__}.{name}"
