# SPDX-License-Identifier: Apache-2.0
"""Which blocks are loaded and saved, and what is held meanwhile."""

from __future__ import annotations

from mooncake.connectors.planner import Planner, SavePlan

NAMES = [bytes([index]) * 4 for index in range(8)]
IDS = [10, 11, 12, 13, 14, 15, 16, 17]


def is_holding(planner: Planner) -> bool:
    return planner.is_holding


def computed(planner: Planner, request_id: str, num_full: int) -> SavePlan | None:
    """A step after which the request's first ``num_full`` blocks are full."""
    return planner.computes(request_id, NAMES[planner.num_saved(request_id) : num_full], IDS)


def test_a_block_is_saved_once_in_the_step_that_fills_it() -> None:
    planner = Planner(1, saves=True)
    planner.found("a", 1)
    assert computed(planner, "a", 3) == SavePlan(0, tuple(NAMES[1:3]), (11, 12), 1)
    assert computed(planner, "a", 3) is None
    assert computed(planner, "a", 4) == SavePlan(1, (NAMES[3],), (13,), 3)
    assert [plan.number for plan in planner.take()[1]] == [0, 1]
    assert planner.take() == ([], [])
    planner.check()


def test_a_name_without_a_block_waits() -> None:
    planner = Planner(1, saves=True)
    assert planner.computes("a", NAMES[:2], IDS[:1]) == SavePlan(0, (NAMES[0],), (10,), 0)
    assert planner.computes("a", NAMES[1:2], IDS[:1]) is None
    assert planner.computes("a", NAMES[1:2], IDS[:2]) == SavePlan(1, (NAMES[1],), (11,), 1)


def test_blocks_are_held_until_every_rank_has_moved_them() -> None:
    planner = Planner(2, saves=True)
    computed(planner, "a", 2)
    planner.finishes("a", NAMES, IDS, 2)
    assert is_holding(planner)
    assert planner.reported({0: 1}, {}) == []
    assert planner.reported({0: 1}, {}) == [10, 11]
    assert not is_holding(planner)
    planner.check()


def test_an_engine_that_does_not_save_holds_nothing() -> None:
    planner = Planner(1, saves=False)
    assert computed(planner, "a", 2) is None
    assert not is_holding(planner)


def test_nothing_is_saved_before_all_ranks_have_loaded() -> None:
    planner = Planner(2, saves=True)
    planner.found("a", 1)
    planner.load("a", NAMES[:1], IDS[:1], is_layerwise=True)
    assert computed(planner, "a", 3) is None
    planner.reported({}, {"a": (1, 0)})
    assert computed(planner, "a", 3) is None
    planner.reported({}, {"a": (1, 0)})
    assert computed(planner, "a", 3) == SavePlan(0, tuple(NAMES[1:3]), (11, 12), 1)


def test_a_load_that_failed_on_one_rank_is_computed_and_saved_from_the_start() -> None:
    planner = Planner(2, saves=True)
    planner.found("a", 2)
    planner.load("a", NAMES[:2], IDS[:2], is_layerwise=True)
    planner.reported({}, {"a": (2, 1)})
    assert computed(planner, "a", 3) == SavePlan(0, tuple(NAMES[:3]), (10, 11, 12), 0)


def test_a_request_that_ends_before_its_load_is_confirmed_is_saved_after_it() -> None:
    planner = Planner(2, saves=True)
    planner.found("a", 1)
    planner.load("a", NAMES[:1], IDS[:1], is_layerwise=True)
    assert planner.finishes("a", NAMES, IDS, 3) == [11, 12]
    assert is_holding(planner)
    assert planner.reported({}, {"a": (1, 0)}) == []
    assert planner.reported({}, {"a": (1, 0)}) == []
    _, (save,) = planner.take()
    assert (save.names, save.block_ids) == (tuple(NAMES[1:3]), (11, 12))
    assert planner.reported({save.number: 2}, {}) == [11, 12]
    assert not is_holding(planner)
    planner.check()


def test_a_request_that_ends_with_a_failed_load_is_not_saved() -> None:
    planner = Planner(2, saves=True)
    planner.load("a", NAMES[:1], IDS[:1], is_layerwise=True)
    planner.finishes("a", NAMES, IDS, 2)
    planner.reported({}, {"a": (1, 1)})
    assert planner.reported({}, {"a": (1, 0)}) == [10, 11]
    assert planner.take()[1] == []
    assert not is_holding(planner)
    planner.check()


def test_nothing_is_saved_that_another_request_computed_on_blocks_that_are_still_arriving() -> None:
    """The engine finds a block in its cache from the step on in which it is to be loaded."""
    planner = Planner(1, saves=True)
    planner.found("a", 2)
    planner.load("a", NAMES[:2], IDS[:2], True)
    planner.found("b", 2)
    assert computed(planner, "b", 3) is None
    assert planner.reported({}, {"a": (1, 1)}) == []
    planner.check()
    plan = computed(planner, "b", 3)
    assert plan is not None and plan.names == tuple(NAMES[2:3]), "computed again, on blocks that are right"
    assert planner.held_blocks == {IDS[2]: 1}


def test_nothing_is_saved_before_the_ranks_have_answered_the_steps_with_loads_of_others() -> None:
    planner = Planner(1, saves=True)
    steps = planner.load_steps
    assert [steps.begins(has_loads) for has_loads in (False, False, True, True, False)] == [0, 0, 3, 4, 0]
    assert computed(planner, "a", 2) is None
    steps.answered(3)
    assert computed(planner, "a", 2) is None
    steps.answered(4)
    assert computed(planner, "a", 2) == SavePlan(0, tuple(NAMES[:2]), (10, 11), 0)
    planner.check()
