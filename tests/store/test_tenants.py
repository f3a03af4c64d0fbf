"""Accounts by themselves: whose objects leave when one is full."""

from __future__ import annotations

from mooncake.store.objects import StoredObject, scoped
from mooncake.store.tenants import Tenants


def test_an_object_that_was_lost_and_comes_back_is_entered_beside_its_former_self() -> None:
    """It has the id that it had, and nothing else by which two of them could be put in order."""
    tenants = Tenants()
    tenants.set_quota("red", 1000, [])
    account = tenants.account_of(scoped("red", "k"))
    for _ in range(2):
        stored = StoredObject(scoped("red", "k"), 7, 0, 100, 100, [], 0.0)
        stored.account = account
        tenants.shown(stored)
    assert account.num_objects == 2
    assert list(account.victims(1.0)) == []
