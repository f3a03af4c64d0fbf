# SPDX-License-Identifier: Apache-2.0
import gzip
import json
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from mooncake.errors import InvalidArgument
from mooncake.sim.silicon import engine_run
from mooncake.sim.silicon.engine_run import (
    EngineLimits,
    EngineLoad,
    EngineRun,
    EngineTimes,
    Floats,
    StepCosts,
    fit_engine,
    fitted_share,
    graded,
    minimum,
    refit_engine,
    simulate_engines,
)

COSTS = StepCosts(0.01, 3e-5, 2e-5, 6e-8, 1e-9, 5e-5, 0.001)
FLAT = StepCosts(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Every step takes a second."""


def load_of(*requests: tuple[float, int, int]) -> EngineLoad:
    arrivals, inputs, outputs = zip(*requests, strict=True)
    ids = [str(number) for number in range(len(requests))]
    return EngineLoad(ids, np.array(arrivals, dtype=float), np.array(inputs), np.array(outputs))


def busy_load(seed: int, num_requests: int = 80) -> EngineLoad:
    random = Random(seed)
    at, requests = 0.0, []
    for _ in range(num_requests):
        at += random.expovariate(8.0)
        requests.append((at, random.randrange(20, 3000), random.randrange(1, 300)))
    return load_of(*requests)


def test_a_prompt_is_computed_in_chunks_and_its_answer_token_by_token() -> None:
    load = load_of((5.0, 250, 3))
    times = simulate_engines(FLAT, EngineLimits(8, 100), load)
    assert times.ttft_s(load).tolist() == [3.0]
    assert times.latency_s(load).tolist() == [5.0]
    assert times.tpot_s(load).tolist() == [1.0]


def test_answers_leave_room_for_so_many_tokens_of_prompts() -> None:
    load = load_of((0.0, 10, 50), (0.0, 10, 50), (10.0, 99, 1))
    times = simulate_engines(FLAT, EngineLimits(8, 100), load)
    # Two tokens of each step are answers', so the prompt of 99 tokens needs two steps.
    assert times.ttft_s(load)[2] == 2.0


def test_a_request_waits_for_a_place() -> None:
    load = load_of((0.0, 10, 5), (0.0, 10, 5))
    times = simulate_engines(FLAT, EngineLimits(1, 100), load)
    assert times.latency_s(load).tolist() == [5.0, 10.0]


def test_the_newest_answer_is_computed_again_when_the_memory_is_full() -> None:
    load = load_of((0.0, 50, 40), (0.0, 50, 40))
    free = simulate_engines(FLAT, EngineLimits(8, 100), load)
    full = simulate_engines(FLAT, EngineLimits(8, 100, kv_tokens=120), load)
    assert free.latency_s(load).tolist() == [40.0, 40.0]
    assert full.latency_s(load)[0] == 40.0
    # It resumes when the first has ended: one step computes again what it had, which makes its next token.
    num_made = 11
    assert full.latency_s(load)[1] == 40.0 + 40 - num_made
    assert full.ttft_s(load).tolist() == free.ttft_s(load).tolist()


def test_engines_share_the_requests() -> None:
    load = load_of(*[(0.0, 10, 5)] * 4)
    times = simulate_engines(FLAT, EngineLimits(1, 100, num_engines=2), load)
    assert times.latency_s(load).tolist() == [5.0, 5.0, 10.0, 10.0]


def test_engines_that_share_experts_end_a_step_together() -> None:
    by_token = StepCosts(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    load = load_of((0.0, 10, 1), (0.0, 90, 1), (40.0, 10, 1))
    apart = EngineLimits(8, 100, num_engines=2)
    times = simulate_engines(by_token, apart, load)
    assert times.ttft_s(load).tolist() == [10.0, 90.0, 10.0]
    # The first engine's step lasts as long as the second's, and the third request waits for its end.
    times = simulate_engines(by_token, msgspec.structs.replace(apart, is_lockstep=True), load)
    assert times.ttft_s(load).tolist() == [90.0, 90.0, 60.0]


@pytest.mark.parametrize(
    ("arguments", "is_lockstep"),
    [
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, True),
        ({"data_parallel_size": 2, "enable_expert_parallel": False}, False),
        ({"enable_expert_parallel": True}, False),
    ],
)
def test_engines_of_a_run_share_experts_where_it_says_so(
    arguments: dict[str, object], is_lockstep: bool, tmp_path: Path
) -> None:
    write_run(tmp_path, [ROW], {"engine_kwargs": arguments})
    assert EngineRun.read(tmp_path).limits.is_lockstep is is_lockstep


@pytest.mark.parametrize("seed", range(8))
def test_every_request_ends_and_nothing_takes_negative_time(seed: int) -> None:
    load = busy_load(seed)
    for kv_tokens in (0, 12_000, 4000):
        limits = EngineLimits(16, 512, kv_tokens, 1 + seed % 2, seed % 4 == 1)
        times = simulate_engines(COSTS, limits, load)
        assert (times.ttft_s(load) > 0).all()
        assert (times.last_token_s >= times.first_token_s).all()
        least_s = (load.num_output - 1) * COSTS.base_s
        assert (times.last_token_s - times.first_token_s >= least_s * 0.999).all()


def test_costs_of_known_requests_predict_the_others() -> None:
    load = busy_load(1, 120)
    limits = EngineLimits(16, 1024)
    run = EngineRun("run", load, simulate_engines(COSTS, limits, load), limits)
    is_known = np.arange(120) % 2 == 0
    fit = fit_engine(run, is_known)
    predicted = simulate_engines(fit.costs, fit.limits, load)
    for name in ("ttft_s", "tpot_s", "latency_s"):
        ours, theirs = (getattr(times, name)(load)[~is_known] for times in (predicted, run.measured))
        assert abs(graded(ours, theirs)["mean"].relative) < 0.02, name


def test_a_memory_limit_is_found_from_the_times() -> None:
    load = busy_load(2, 40)
    limits = EngineLimits(64, 1024)
    measured = simulate_engines(COSTS, msgspec.structs.replace(limits, kv_tokens=20_000), load)
    fit = fit_engine(EngineRun("run", load, measured, limits), np.arange(40) % 2 == 0)
    assert 16_000 < fit.limits.kv_tokens < 25_000


@pytest.mark.parametrize(("kv_tokens", "accepted"), [(20_000, True), (0, False)])
def test_a_memory_limit_is_accepted_where_it_predicts_requests_that_the_fit_has_not_seen(
    kv_tokens: int, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, limits = busy_load(2, 60), EngineLimits(64, 1024)
    measured = simulate_engines(COSTS, msgspec.structs.replace(limits, kv_tokens=kv_tokens), load)
    run, is_known = EngineRun("run", load, measured, limits), np.arange(60) % 2 == 0
    tried = engine_run.EngineFit(COSTS, msgspec.structs.replace(limits, kv_tokens=20_000), 0.0)
    # The fit with the limit pretends to explain the requests that it has seen perfectly.
    monkeypatch.setattr(engine_run, "_fit_with_memory", lambda *_: tried)
    monkeypatch.setattr(engine_run, "_best_limit", lambda *_: tried)
    assert fit_engine(run, is_known).limits.kv_tokens == (20_000 if accepted else 0)


def test_too_few_known_requests_are_refused() -> None:
    load = busy_load(3, 10)
    run = EngineRun("run", load, simulate_engines(COSTS, EngineLimits(), load), EngineLimits())
    with pytest.raises(InvalidArgument, match="at least 8"):
        fit_engine(run, np.arange(10) < 7)


def write_run(folder: Path, rows: list[dict[str, object]], meta: object) -> None:
    folder.joinpath("requests.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    folder.joinpath("meta.json").write_text(json.dumps(meta))


def test_a_run_is_read_in_the_order_of_its_arrivals(tmp_path: Path) -> None:
    row: dict[str, object] = {"input_toks": 5, "output_toks": 3}
    late: dict[str, object] = {
        **row,
        "request_id": "late",
        "queued_ts": 12.5,
        "first_token_ts": 13.0,
        "last_token_ts": 14.0,
    }
    unknown: dict[str, object] = {**row, "request_id": "unknown", "queued_ts": 10.0, "first_token_ts": None}
    arguments = {"max_num_seqs": 128, "max_num_batched_tokens": None, "data_parallel_size": 2}
    write_run(tmp_path, [late, unknown], {"model": "m", "engine_kwargs": arguments})
    run = EngineRun.read(tmp_path)
    assert (run.name, run.load.ids) == ("m", ["unknown", "late"])
    assert run.load.queued_s.tolist() == [0.0, 2.5]
    assert run.limits == EngineLimits(128, 8192, 0, 2)
    assert np.isnan(run.measured.last_token_s[0]) and run.measured.ttft_s(run.load)[1] == 0.5
    assert run.measured.tpot_s(run.load)[1] == 0.5


ROW = {"request_id": "a", "input_toks": 5, "output_toks": 3, "queued_ts": 1.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a run with requests"),
        ("not json", "requests.jsonl, line 1: "),
        (json.dumps(ROW) + '\n\n{"request_id": "a"}', "requests.jsonl, line 3: .*input_toks"),
        (json.dumps({**ROW, "input_toks": 0}), "line 1: .*input_toks"),
        (json.dumps({**ROW, "output_toks": "many"}), "line 1: .*output_toks"),
        (json.dumps({**ROW, "output_toks": 2.5}), "line 1: .*output_toks"),
        ("[1", "line 1: (?!jSON)"),
        (json.dumps({**ROW, "queued_ts": None}), "a run with requests"),
        (json.dumps({**ROW, "queued_ts": None, "first_token_ts": 2.0}), "line 1: queued_ts is None"),
        (json.dumps({**ROW, "queued_ts": -1.0, "first_token_ts": 2.0}), "line 1: queued_ts is None"),
        (json.dumps({**ROW, "queued_ts": float("inf")}), "line 1: queued_ts is inf"),
        (json.dumps({**ROW, "last_token_ts": float("inf")}), "line 1: last_token_ts is inf"),
        (json.dumps({**ROW, "first_token_ts": 1.0}), "first_token_ts 1.0 is queued_ts, but no token"),
        (json.dumps({**ROW, "last_token_ts": 1.0}), "last_token_ts 1.0 is queued_ts, but no token"),
        (json.dumps({**ROW, "output_toks": 10**12}), "line 1: .*output_toks"),
        (json.dumps({**ROW, "first_token_ts": 0.5}), "line 1: first_token_ts 0.5 is before 1.0"),
        (json.dumps({**ROW, "first_token_ts": 3, "last_token_ts": 2}), "last_token_ts 2.0 is before 3.0"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "requests.jsonl").write_text(content)
    with pytest.raises(InvalidArgument, match=f"RUN_DIR.*{message}"):
        EngineRun.read(tmp_path)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("[]", "meta.json: expected `object`"),
        ('{"engine_kwargs": {"max_num_seqs": "many"}}', "meta.json: .*engine_kwargs.max_num_seqs"),
        ('{"engine_kwargs": {"max_num_batched_tokens": -1}}', "engine_kwargs.max_num_batched_tokens"),
    ],
)
def test_odd_limits_are_refused(tmp_path: Path, meta: str, message: str) -> None:
    (tmp_path / "requests.jsonl").write_text(json.dumps(ROW))
    (tmp_path / "meta.json").write_text(meta)
    with pytest.raises(InvalidArgument, match=message):
        EngineRun.read(tmp_path)


def test_a_missing_folder_and_text_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"requests\.jsonl: No such file"):
        EngineRun.read(tmp_path / "missing")
    (tmp_path / "requests.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match=r"requests\.jsonl: .*decode"):
        EngineRun.read(tmp_path)


def test_a_run_without_meta_has_the_engines_defaults(tmp_path: Path) -> None:
    rows = [{**ROW, "request_id": 7, "unheard_of": [1]}, {**ROW, "output_toks": 0}]
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = EngineRun.read(tmp_path)
    assert (run.name, run.load.ids, run.num_left_out) == (tmp_path.name, ["7"], 1)
    assert run.limits == EngineLimits()
    (tmp_path / "vllm" / "meta.json").write_text('{"engine_kwargs": null}')
    assert EngineRun.read(tmp_path).limits == EngineLimits()


def test_a_message_about_json_says_json(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(json.dumps(ROW))
    (tmp_path / "meta.json").write_text('{"model": x}')
    with pytest.raises(InvalidArgument, match=r"meta\.json: JSON is malformed"):
        EngineRun.read(tmp_path)


def test_limits_are_found_beside_the_requests_or_above_and_the_missing_are_named(tmp_path: Path) -> None:
    place = tmp_path / "vllm"
    place.mkdir()
    (place / "requests.jsonl").write_text(json.dumps(ROW))
    assert EngineRun.read(tmp_path).default_limits == ("max_num_seqs", "max_num_batched_tokens")
    (tmp_path / "meta.json").write_text('{"engine_args": {"max_num_seqs": "128"}}')
    for folder in (tmp_path, place):
        run = EngineRun.read(folder)
        assert (run.limits.max_num_seqs, run.default_limits) == (128, ("max_num_batched_tokens",))
    place.joinpath("meta.json").write_text(
        '{"engine_kwargs": {"max_num_seqs": 9, "max_num_batched_tokens": 64}}'
    )
    run = EngineRun.read(tmp_path)
    assert (run.limits, run.default_limits) == (EngineLimits(9, 64), ())


def test_harmless_differences_are_read(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"input_toks": 5.0, "output_toks": "3", "arrival_time": 100.0, "first_token_ts": 101.0},
        {"input_toks": 5, "output_toks": 3, "arrival_time": 102.5, "queued_ts": 7.0, "last_token_ts": -1},
        {"input_toks": 5, "output_toks": 3, "arrival_time": 103, "first_token_ts": float("nan")},
        {"input_toks": 5, "output_toks": 3, "arrival_time": 104, "first_token_ts": 0, "last_token_ts": 106},
    ]
    text = "\ufeff" + "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "requests.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    run = EngineRun.read(tmp_path)
    assert run.load.ids == ["1", "2", "3", "4"]
    assert run.load.num_input.tolist() == [5] * 4
    assert run.load.queued_s.tolist() == [0.0, 2.5, 3.0, 4.0]
    assert np.isnan(run.measured.first_token_s).tolist() == [False, True, True, True]
    assert np.isnan(run.measured.last_token_s).tolist() == [True, True, True, False]
    assert run.span_s == 6.0


def test_arrivals_that_are_not_known_are_those_of_the_time_of_day(tmp_path: Path) -> None:
    """As LLMServingSim writes them: all times but ``arrival_time`` are of the host's monotonic clock."""
    day = 1_777_000_000.0
    row = {"input_toks": 5, "output_toks": 3}
    rows: list[dict[str, object]] = [
        {**row, "arrival_time": day, "queued_ts": 100.25, "first_token_ts": 101.0, "last_token_ts": 102.0},
        {**row, "arrival_time": day + 1, "queued_ts": 101.5, "first_token_ts": 102.0},
        {**row, "arrival_time": day + 2, "queued_ts": None},
        {
            "input_toks": 5,
            "output_toks": 0,
            "arrival_time": day + 3,
            "queued_ts": None,
            "first_token_ts": 1.0,
        },
        {"input_toks": 5, "output_toks": None, "arrival_time": None},
    ]
    (tmp_path / "requests.jsonl").write_text("\n".join(json.dumps(one) for one in rows))
    run = EngineRun.read(tmp_path)
    assert run.load.queued_s.tolist() == pytest.approx([0.0, 1.25, 2.0])
    assert run.num_left_out == 2


TIMES = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts")


@pytest.mark.parametrize("unset", [None, 0.0, -1.0, float("nan")])
def test_a_request_without_any_time_is_left_out(tmp_path: Path, unset: float | None) -> None:
    """As LLMServingSim writes a request that failed: it has the tokens that were asked for."""
    day = 1_777_000_000.0
    rows: list[dict[str, object]] = [
        {
            "request_id": f"bench-{number}",
            "input_toks": 5,
            "output_toks": 3,
            **dict(zip(TIMES, (day + number, 500.0 + number, 500.5 + number, 501.0 + number), strict=True)),
        }
        for number in range(4)
    ]
    rows[1] |= dict.fromkeys(TIMES, unset)
    rows[2]["queued_ts"] = unset
    write_run(tmp_path, rows, {})
    run = EngineRun.read(tmp_path)
    assert (run.load.ids, run.num_left_out) == (["bench-0", "bench-2", "bench-3"], 1)
    assert (run.load.queued_s.tolist(), run.arrival) == ([0.0, 2.0, 3.0], "queued_ts")
    assert run.has_times.all() and run.span_s == 4.0


def test_an_arrival_of_zero_is_one_where_the_clock_begins_with_the_run(tmp_path: Path) -> None:
    times = [(0.0, 0.5, 2.0), (3.0, 3.5, 4.0), (0.0, 0.0, 0.0)]
    names = TIMES[1:]
    rows = [{**ROW, "request_id": str(at), **dict(zip(names, at, strict=True))} for at in times]
    write_run(tmp_path, rows, {})
    run = EngineRun.read(tmp_path)
    assert (run.load.queued_s.tolist(), run.num_left_out) == ([0.0, 3.0], 1)
    late = [{**row, **{name: 900.0 + float(str(row[name])) for name in names}} for row in rows[:2]]
    late.append({**late[0], "request_id": "default", "queued_ts": 0.0})
    write_run(tmp_path, late, {})
    with pytest.raises(InvalidArgument, match="line 3: queued_ts is None"):
        EngineRun.read(tmp_path)


def test_the_delay_before_the_queue_is_that_beyond_the_smallest_difference(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {**ROW, "request_id": "a", "arrival_time": 7000.0, "queued_ts": 10.0, "first_token_ts": 11.0},
        {**ROW, "request_id": "b", "arrival_time": 7001.0, "queued_ts": 11.25, "first_token_ts": 12.0},
        {**ROW, "request_id": "c", "arrival_time": None, "queued_ts": 12.0, "first_token_ts": 12.5},
    ]
    write_run(tmp_path, rows, {})
    run = EngineRun.read(tmp_path)
    assert run.delay_s is not None and run.arrival == "queued_ts"
    assert run.delay_s == pytest.approx(np.array([0.0, 0.25, np.nan]), nan_ok=True)
    one_clock = [{**row, "queued_ts": None, "arrival_time": row["queued_ts"]} for row in rows]
    write_run(tmp_path, one_clock, {})
    run = EngineRun.read(tmp_path)
    assert (run.delay_s, run.arrival) == (None, "arrival_time")


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085"])
def test_a_text_may_have_what_ends_lines_elsewhere(tmp_path: Path, character: str) -> None:
    row = {**ROW, "prompt": f"a{character}b"}
    lines = [json.dumps(row, ensure_ascii=False), json.dumps({**ROW, "request_id": "b"})]
    (tmp_path / "requests.jsonl").write_bytes("\r\n".join(lines).encode())
    assert EngineRun.read(tmp_path).load.ids == ["a", "b"]


def test_each_limit_is_that_of_the_first_place_that_states_it(tmp_path: Path) -> None:
    resolved: dict[str, object] = {
        "scheduler_config": {"max_num_seqs": 7, "max_num_batched_tokens": "<int>", "policy": "fcfs"},
        "cache_config": {"kv_cache_size_tokens": 605_104, "block_size": 16},
        "parallel_config": "<ParallelConfig>",
    }
    asked = {"max_num_seqs": 128, "data_parallel_size": 2}
    other = {"max_num_batched_tokens": 64, "enable_expert_parallel": True}
    meta: dict[str, object] = {
        "resolved_config": resolved,
        "engine_kwargs": asked,
        "engine_args": other,
        "kv_cache": {"num_kv_tokens": 1_210_208},
    }
    write_run(tmp_path, [ROW], meta)
    run = EngineRun.read(tmp_path)
    assert (run.limits, run.default_limits) == (EngineLimits(7, 64, 605_104, 2, True), ())
    write_run(tmp_path, [ROW], {"engine_kwargs": {}, "engine_args": asked, "resolved_config": {}})
    run = EngineRun.read(tmp_path)
    assert (run.limits, run.default_limits) == (EngineLimits(128, 8192, 0, 2), ("max_num_batched_tokens",))
    write_run(tmp_path, [ROW], {"resolved_config": {"scheduler_config": {"max_num_seqs": 0}}})
    assert EngineRun.read(tmp_path).limits == EngineLimits()


def test_a_memory_limit_that_is_stated_is_not_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    load, limits = busy_load(2, 40), EngineLimits(64, 1024, 20_000)
    monkeypatch.setattr(engine_run, "_fit", lambda run, limits, *_: engine_run.EngineFit(COSTS, limits, 1.0))
    monkeypatch.setattr(engine_run, "_best_limit", lambda *_: pytest.fail("it is known"))
    run = EngineRun("run", load, simulate_engines(COSTS, limits, load), limits)
    assert fit_engine(run, np.arange(40) % 2 == 0).limits == limits


def test_times_that_are_graded_are_not_fitted() -> None:
    load = busy_load(4, 40)
    limits = EngineLimits(16, 512)
    measured = simulate_engines(COSTS, limits, load)
    is_known = np.arange(40) % 2 == 0
    other = EngineTimes(
        np.where(is_known, measured.first_token_s, 7 * measured.first_token_s),
        np.where(is_known, measured.last_token_s, 9 * measured.last_token_s),
    )
    fits = [fit_engine(EngineRun("run", load, one, limits), is_known) for one in (measured, other)]
    assert fits[0] == fits[1]


def test_grades_leave_out_what_is_unknown() -> None:
    errors = graded(np.array([1.1, 5.0, np.nan]), np.array([1.0, np.nan, 2.0]))
    assert errors["mean"].relative == pytest.approx(0.1)
    assert graded(np.array([np.nan]), np.array([1.0])) == {}


def requests_of(load: EngineLoad, times: EngineTimes) -> list[dict[str, object]]:
    """As a run's file has them."""
    columns = zip(
        load.ids,
        load.num_input.tolist(),
        load.num_output.tolist(),
        (load.queued_s + 500).tolist(),
        (times.first_token_s + 500).tolist(),
        (times.last_token_s + 500).tolist(),
        strict=True,
    )
    names = ("request_id", "input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
    return [dict(zip(names, one, strict=True)) for one in columns]


def test_requests_without_times_are_neither_fitted_on_nor_graded(tmp_path: Path) -> None:
    load = busy_load(5, 40)
    rows = requests_of(load, simulate_engines(COSTS, EngineLimits(), load))
    rows[3]["last_token_ts"] = rows[4]["first_token_ts"] = None
    del rows[5]["last_token_ts"]
    write_run(tmp_path, rows, {})
    run = EngineRun.read(tmp_path)
    assert np.flatnonzero(~run.has_times).tolist() == [3, 4, 5] and len(run.load.ids) == 40
    for share, num_fitted in ((0.5, 18), (0.99, 36), (0.01, 0)):
        is_known = fitted_share(run, share, Random(1))
        assert is_known.sum() == num_fitted and not is_known[[3, 4, 5]].any()
    assert (fitted_share(run, 0.5, Random(1)) != fitted_share(run, 0.5, Random(2))).any()


def test_a_fit_to_more_requests_begins_with_an_earlier_one() -> None:
    load, limits = busy_load(1, 60), EngineLimits(16, 1024)
    run = EngineRun("run", load, simulate_engines(COSTS, limits, load), limits)
    is_known = np.arange(60) % 6 == 0
    few = fit_engine(run, is_known)
    more = refit_engine(run, run.has_times, few)
    assert more.limits == few.limits
    start = engine_run._loss(run, limits, run.has_times, few.costs)
    assert more.loss < start and more.loss == engine_run._loss(run, limits, run.has_times, more.costs)


def test_times_are_taken_from_either_prediction() -> None:
    one, other = (EngineTimes(np.full(2, value), np.full(2, value + 1)) for value in (1.0, 5.0))
    mixed = one.where(np.array([True, False]), other)
    assert (mixed.first_token_s.tolist(), mixed.last_token_s.tolist()) == ([1.0, 5.0], [2.0, 6.0])


def test_a_line_that_is_repeated_is_one_request_and_an_id_that_is_repeated_are_two(tmp_path: Path) -> None:
    row = {**ROW, "first_token_ts": 2.0, "last_token_ts": 3.0}
    write_run(tmp_path, [row, {**row, "queued_ts": 1.5}, row, {**row, "request_id": "b"}], {})
    run = EngineRun.read(tmp_path)
    assert run.load.ids == ["a", "b", "a"] and run.load.queued_s.tolist() == [0.0, 0.0, 0.5]
    assert (run.num_repeated, run.num_shared_ids, run.num_left_out) == (1, 1, 0)
    unnamed = {name: value for name, value in row.items() if name != "request_id"}
    write_run(tmp_path, [unnamed, unnamed], {})
    run = EngineRun.read(tmp_path)
    assert (run.load.ids, run.num_repeated) == (["1", "2"], 0), "without ids, two requests may be alike"


@pytest.mark.parametrize(("unit", "factor"), [("s", 1), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)])
def test_times_in_smaller_units_are_noticed_by_what_a_token_takes(
    tmp_path: Path, unit: str, factor: float
) -> None:
    load = busy_load(6, 30)
    measured = simulate_engines(COSTS, EngineLimits(), load)
    rows = requests_of(load, measured)
    names = ("queued_ts", "first_token_ts", "last_token_ts")
    scaled = [{**row, **{name: factor * float(str(row[name])) for name in names}} for row in rows]
    write_run(tmp_path, scaled, {})
    run = EngineRun.read(tmp_path)
    assert run.time_unit == unit
    start = load.queued_s[0]
    assert run.load.queued_s == pytest.approx(load.queued_s - start, abs=1e-6)
    assert run.measured.last_token_s == pytest.approx(measured.last_token_s - start, abs=1e-6)
    assert 0.005 < run.median_token_s < 0.1


def test_a_slow_engine_is_believed(tmp_path: Path) -> None:
    write_run(tmp_path, [{**ROW, "first_token_ts": 2.0, "last_token_ts": 8.0}], {})
    run = EngineRun.read(tmp_path)
    assert (run.time_unit, run.median_token_s) == ("s", 3.0)


def test_the_simplex_method_finds_a_minimum() -> None:
    target = np.array([1.0, -2.0, 0.5])
    found, value = minimum(lambda point: float(((point - target) ** 2).sum()), np.zeros(3), 200)
    assert value < 1e-6
    assert found == pytest.approx(target, abs=1e-2)


def test_times_of_one_token_answers_have_no_tpot() -> None:
    load = load_of((0.0, 5, 1))
    assert np.isnan(EngineTimes(np.array([1.0]), np.array([1.0])).tpot_s(load)[0])


@pytest.mark.parametrize("seed", range(6))
def test_steps_that_are_taken_together_are_those_taken_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = busy_load(seed)
    limits = [EngineLimits(16, 512, kv_tokens, 1 + seed % 2) for kv_tokens in (0, 12_000, 4000)]
    together = [simulate_engines(COSTS, one, load) for one in limits]
    num_steps: list[int] = []
    begin = engine_run._Engine.begin

    def counted(self: engine_run._Engine) -> float:
        num_steps.append(1)
        return begin(self)

    monkeypatch.setattr(engine_run._Engine, "begin", counted)
    assert simulate_engines(COSTS, limits[0], load).last_token_s == pytest.approx(together[0].last_token_s)
    num_taken = len(num_steps)
    monkeypatch.setattr(engine_run._Engine, "leap", lambda *_: None)
    for one, times in zip(limits, together, strict=True):
        alone = simulate_engines(COSTS, one, load)
        assert times.first_token_s == pytest.approx(alone.first_token_s, rel=1e-9), (seed, one)
        assert times.last_token_s == pytest.approx(alone.last_token_s, rel=1e-9), (seed, one)
    num_steps.clear()
    simulate_engines(COSTS, limits[0], load)
    assert num_taken < 0.8 * len(num_steps), "otherwise nothing was taken together"


def test_no_memory_limit_is_tried_that_was_never_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    load, limits = busy_load(2, 60), EngineLimits(64, 1024)
    run = EngineRun("run", load, simulate_engines(COSTS, limits, load), limits)
    tried: list[int] = []

    def fit(_: object, tried_limits: EngineLimits, *__: object) -> engine_run.EngineFit:
        tried.append(tried_limits.kv_tokens)
        return engine_run.EngineFit(COSTS, tried_limits, 1.0)

    monkeypatch.setattr(engine_run, "_fit", fit)
    unlimited = engine_run.EngineFit(COSTS, limits, 1.0)
    assert engine_run._best_limit(run, np.arange(60) % 2 == 0, unlimited) == unlimited
    free = simulate_engines(COSTS, limits, load)
    at_most = simulate_engines(COSTS, msgspec.structs.replace(limits, kv_tokens=max(tried)), load)
    below = simulate_engines(COSTS, msgspec.structs.replace(limits, kv_tokens=tried[1]), load)
    assert (at_most.last_token_s == free.last_token_s).all(), "the first one is just what was needed"
    assert (below.last_token_s != free.last_token_s).any(), "every other one is less"


def test_the_simplex_method_stops_where_it_no_longer_gains() -> None:
    calls: list[float] = []

    def bowl(point: Floats) -> float:
        calls.append(1 + float((point**2).sum()))
        return calls[-1]

    _, value = minimum(bowl, np.array([3.0, -4.0]), 10_000)
    assert value < 1.001 and len(calls) < 200
