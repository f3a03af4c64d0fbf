"""Each policy picks what its formula says, and says so."""

from __future__ import annotations

from collections import Counter
from random import Random

from mooncake.conductor import select
from mooncake.conductor.health import Instance
from mooncake.conductor.select import Job
from mooncake.types import Role


def instances(*queued: int) -> list[Instance]:
    made = []
    for number, tokens in enumerate(queued):
        instance = Instance(f"h:{number}", Role.PREFILL)
        if tokens:
            instance.add_prefill(f"r{number}", tokens)
        made.append(instance)
    return made


def job(num_tokens: int = 1000, **fields: object) -> Job:
    cached: dict[str, int] = {}
    made = Job(num_tokens, cached, block_tokens=10, now=1000.0, slow_start_s=10.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_cache_outweighs_a_shorter_queue_until_it_does_not() -> None:
    choice = select.prefill_by_cache(instances(0, 500), job(cached_blocks={"h:1": 90}))
    assert choice.instance.id == "h:1"
    assert "900 of 1000 tokens cached, 500 queued" in choice.reason
    assert select.prefill_by_cache(instances(0, 901), job(cached_blocks={"h:1": 90})).instance.id == "h:0"


def test_load_ignores_the_cache() -> None:
    choice = select.prefill_by_load(instances(1, 0, 2), job(cached_blocks={"h:2": 100}))
    assert choice.instance.id == "h:1"


def test_equals_are_served_by_who_served_least() -> None:
    candidates = instances(0, 0)
    candidates[0].num_placed = 5
    assert select.prefill_by_cache(candidates, job()).instance.id == "h:1"


def test_affinity_is_followed_until_it_would_cost_more_than_the_prompt() -> None:
    choices = [select.prefill_by_cache(instances(0, 0, 0), job(affinity=f"s{n}")) for n in range(30)]
    assert len({choice.instance.id for choice in choices}) == 3
    again = select.prefill_by_cache(instances(100, 100, 100), job(affinity="s0"))
    assert again.instance.id == choices[0].instance.id
    assert again.reason.startswith("affinity")
    queues = [5000 if f"h:{n}" == again.instance.id else 0 for n in range(3)]
    assert select.prefill_by_cache(instances(*queues), job(affinity="s0")).instance.id != again.instance.id


def test_decode_goes_where_fewest_run() -> None:
    assert select.decode_by_load(instances(5, 0, 5), job()).instance.id == "h:1"
    assert select.decode_by_load(instances(0, 0), job(cached_blocks={"h:1": 6})).instance.id == "h:1"


def test_round_robin_takes_turns_and_newcomers_come_less_often() -> None:
    candidates, turns = instances(0, 0, 0), dict[str, float]()
    chosen = [select.round_robin(candidates, job(turns=turns)).instance.id for _ in range(6)]
    assert Counter(chosen) == {"h:0": 2, "h:1": 2, "h:2": 2}
    candidates[2].ready_since = 1000.0  # a tenth of a share
    chosen = [select.round_robin(candidates, job(turns=turns)).instance.id for _ in range(21)]
    assert Counter(chosen) == {"h:0": 10, "h:1": 10, "h:2": 1}


def test_random_is_seeded() -> None:
    def chosen(seed: int) -> list[str]:
        random = Random(seed)
        return [select.at_random(instances(0, 0, 0), job(random=random)).instance.id for _ in range(50)]

    assert chosen(1) == chosen(1)
    assert len(set(chosen(1))) == 3


def test_a_newcomer_gets_less() -> None:
    candidates = instances(500, 0)
    candidates[1].ready_since = 1000.0
    assert select.prefill_by_load(candidates, job()).instance.id == "h:0"
