# SPDX-License-Identifier: Apache-2.0
"""The calls that remove objects."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.compat.store.arguments import check_key, check_keys, flag, is_good_key
from mooncake.compat.store.batches import pick
from mooncake.compat.store.error_codes import StoreCode, code_of
from mooncake.compat.store.lifecycle import StoreLifecycle
from mooncake.compat.store.store_session import StoreSession


class RemoveCalls(StoreLifecycle):
    """Removal of objects by key, by expression, or of all."""

    def remove(self, key: str, force: bool = False) -> int:
        """Remove an object: 0; -704 for a miss, -706 when it is leased, unless ``force``."""
        key = check_key("remove", key)
        return self._remove("remove", [key], flag("remove", "force", force))[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """As ``remove`` of each; with ``force`` also of those that are leased."""
        what = "batch_remove"
        return self._remove(what, check_keys(what, keys), flag(what, "force", force))

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove objects whose key matches the RE2 expression; their number, -600 if it is invalid."""
        regex_pattern = check_key("remove_by_regex", regex_pattern)
        force = flag("remove_by_regex", "force", force)

        def remove(session: StoreSession) -> int:
            return session.store.remove_matching(regex_pattern, force)

        return self._in_session("remove_by_regex", remove, int)

    def remove_all(self, force: bool = False) -> int:
        """Remove all objects of this tenant; their number. Leased ones stay, unless ``force``."""
        force = flag("remove_all", "force", force)
        return self._in_session("remove_all", lambda session: session.store.remove_all(force), int)

    def _remove(self, what: str, keys: list[str], force: bool) -> list[int]:
        def remove(session: StoreSession) -> list[int]:
            at = [i for i, key in enumerate(keys) if is_good_key(key)]
            codes = [int(StoreCode.OBJECT_NOT_FOUND)] * len(keys)
            for i, outcome in zip(at, session.store.remove(pick(keys, at), force), strict=True):
                codes[i] = code_of(outcome)
            return codes

        return self._in_session(what, remove, lambda code: [code] * len(keys))
