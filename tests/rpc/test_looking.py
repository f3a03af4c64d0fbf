from __future__ import annotations

from mooncake.rpc.looking import EVERY, FOUND, MAX_TRUST, Looking


def looks(looking: Looking, times: int, is_found: bool) -> int:
    """How often it was worth a look."""
    num_looks = 0
    for _ in range(times):
        if looking.pays:
            num_looks += 1
            looking.found(is_found)
    return num_looks


def test_it_goes_on_while_something_is_found() -> None:
    assert looks(Looking(), 1000, is_found=True) == 1000


def test_it_stops_when_nothing_is_found_and_tries_now_and_then() -> None:
    looking = Looking()
    assert looks(looking, MAX_TRUST, is_found=False) == MAX_TRUST
    assert looks(looking, 10 * EVERY, is_found=False) == 10


def test_one_find_in_three_is_enough() -> None:
    looking = Looking()
    assert FOUND == 2
    for _ in range(100):
        assert looks(looking, 1, is_found=True) == 1
        assert looks(looking, 2, is_found=False) == 2


def test_it_begins_again_when_a_try_finds_something() -> None:
    looking = Looking()
    looks(looking, MAX_TRUST, is_found=False)
    assert looks(looking, EVERY, is_found=True) == 1, "the last of them"
    assert looks(looking, 100, is_found=True) == 100
