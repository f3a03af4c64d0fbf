# SPDX-License-Identifier: Apache-2.0
"""The sum over the pool's keys: tiers, tenants, models, chains of blocks."""

from __future__ import annotations

from mooncake.console.contents import MAX_CELLS, MAX_KEYS_READ, MAX_ROWS, PoolContents, model_of, tenants_of
from mooncake.store import messages as m
from mooncake.types import Tier


def stored(
    uses: int = 0, parent: str = "", size: int = 100, tiers: tuple[Tier, ...] = (Tier.MEMORY,)
) -> m.ObjectStatus:
    replicas = [m.ReplicaDetail("n", "h", tier, 0, True, True) for tier in tiers]
    return m.ObjectStatus(1, size, size, uses, 0.0, 0.0, "", parent, 0, False, replicas)


def test_objects_are_added_up_by_tenant_model_and_tier() -> None:
    pool = PoolContents()
    pool.add(
        "default", [("kv/d1/a", stored()), ("kv/d1/b", stored(tiers=(Tier.MEMORY, Tier.SSD))), ("x", None)]
    )
    pool.add("team", [("kv/d2/c", stored(size=700)), ("readme", stored(size=1))])
    rows = {
        (one["tenant"], one["model"], one["tier"]): (one["num_objects"], one["size_bytes"])
        for one in pool.rows()
    }
    assert rows == {
        ("default", "kv/d1", "memory"): (2, 200),
        ("default", "kv/d1", "ssd"): (1, 100),
        ("team", "kv/d2", "memory"): (1, 700),
        ("team", "other objects", "memory"): (1, 1),
    }
    assert pool.num_read == 4


def test_chains_are_one_prefix_each_in_any_order_of_keys() -> None:
    chain = [
        ("c", stored(1, "b")),
        ("a", stored(9)),
        ("d", stored(2, "b")),
        ("b", stored(5, "a")),
        ("z", stored(3, "gone")),
    ]
    pool = PoolContents()
    pool.add("default", chain)
    rows = [(one.key, one.num_blocks, one.num_uses, one.longest) for one in pool.prefixes()]
    assert rows == [("a", 4, 17, 3), ("z", 1, 3, 1)]


def test_cycles_and_long_chains_end() -> None:
    pool = PoolContents()
    pool.add("default", [("a", stored(parent="b")), ("b", stored(parent="a")), ("s", stored(parent="s"))])
    assert sum(one.num_blocks for one in pool.prefixes()) == 3
    pool = PoolContents()
    pool.add("default", [(str(number), stored(parent=str(number - 1))) for number in range(5000)])
    [one] = pool.prefixes()
    assert (one.num_blocks, one.longest) == (5000, 5000)


def test_equal_keys_of_two_tenants_are_apart() -> None:
    pool = PoolContents()
    pool.add("a", [("k", stored(1))])
    pool.add("b", [("k", stored(2)), ("l", stored(0, "k"))])
    assert [(one.tenant, one.num_uses) for one in pool.prefixes()] == [("b", 2), ("a", 1)]


def test_everything_is_bounded_and_a_sample_says_so() -> None:
    pool = PoolContents()
    pool.add(
        "default", ((f"kv/d{number % 99}/{number}", stored(number)) for number in range(MAX_KEYS_READ + 50))
    )
    assert not pool.has_room and pool.num_read == MAX_KEYS_READ
    found = pool.summary(MAX_KEYS_READ + 50, 1.5)
    assert found["is_sample"] and found["num_read"] == MAX_KEYS_READ
    assert len(found["rows"]) == len(found["prefixes"]) == MAX_ROWS
    assert len(found["cells"]["uses"]) == len(found["cells"]["tier"]) == MAX_CELLS
    assert found["cells"]["uses"] == sorted(found["cells"]["uses"], reverse=True)


def test_model_is_the_digest_in_a_blocks_key() -> None:
    assert model_of("kv/abc/def") == "kv/abc" and model_of("encoder/abc/def") == "encoder/abc"
    assert model_of("notes/kv/x") == model_of("kv/short") == "other objects"


def test_tenants_are_listed_by_use() -> None:
    rows = tenants_of([m.QuotaStatus("", None, 5, 1), m.QuotaStatus("team", 100, 50, 2)])
    assert [(row["tenant"], row["used_bytes"]) for row in rows] == [("team", 50), ("default", 5)]
