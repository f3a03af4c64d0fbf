# SPDX-License-Identifier: Apache-2.0
"""The engine's answers equal transformers' greedy answers, token by token, in every mode of computation."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from mooncake.errors import InvalidArgument, Refusal
from mooncake.inference import scheduler
from mooncake.inference.blocks import BlockEvent, PoolBlocksRemoved, PoolBlocksStored
from mooncake.inference.engine import Engine, EngineThread, InferenceSettings, Output
from mooncake.inference.gguf import resolve_model
from mooncake.inference.request import AnswerWeights, FinishReason, Request, SamplingParams
from mooncake.inference.runner import TorchRunner, new_pool
from mooncake.inference.weights import load_model
from tests import corpus
from tests.inference.conftest import Reference, prompt_of
from tests.inference.dictionary_link import (
    DictionaryLink,
    DictionaryLoad,
    DictionaryLookup,
    DictionarySave,
    Objects,
)

BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1)
NUM_TOKENS = 20  # crosses at least one block boundary while decoding


def make_engine(
    reference: Reference,
    link: DictionaryLink | None = None,
    num_blocks: int = 64,
    max_batch_tokens: int = 512,
    max_running: int = 16,
    max_waiting: int = 64,
) -> Engine:
    model = load_model(reference.folder)
    layout = model.config.kv_layout(model.dtype, BLOCK)
    pool = new_pool(model, BLOCK, num_blocks * layout.pool_bytes(1))
    # Unwritten memory must not be read: here it would turn every answer into NaN.
    pool.fill_(torch.nan)
    if link is not None:
        link.pool = pool
    settings = InferenceSettings(
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_waiting=max_waiting,
    )
    return Engine(settings, TorchRunner(model, pool, link), link)


def pool_of(engine: Engine) -> torch.Tensor:
    assert isinstance(engine.runner, TorchRunner)
    return engine.runner.pool


def greedy(prompt: list[int], num_tokens: int = NUM_TOKENS, name: str = "r", **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return Request(name, prompt, sampling, **fields)  # type: ignore[arg-type]


def run(engine: Engine, *requests: Request, max_steps: int = 2000) -> dict[str, list[int]]:
    """Add requests, step until all have finished; their tokens by id."""
    for request in requests:
        assert engine.add(request) is None
    answers: dict[str, list[int]] = {request.id: [] for request in requests}
    finished = finish(engine, answers, max_steps)
    assert all(output.finish_reason in ("stop", "length") for output in finished.values()), finished
    return answers


def finish(engine: Engine, answers: dict[str, list[int]], max_steps: int = 2000) -> dict[str, Output]:
    finished: dict[str, Output] = {}
    for _ in range(max_steps):
        _, outputs = engine.step()
        engine.check()
        for output in outputs:
            answers.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                finished[output.request_id] = output
        if len(finished) == len(answers):
            return finished
    raise AssertionError(f"not finished after {max_steps} steps: {engine.scheduler}")


@pytest.mark.parametrize("length", LENGTHS)
def test_whole_prefill_equals_transformers(reference: Reference, length: int) -> None:
    prompt = prompt_of(length)
    assert run(make_engine(reference), greedy(prompt))["r"] == reference.greedy(prompt, NUM_TOKENS)


@pytest.mark.parametrize("budget", [1, 7, BLOCK])
def test_chunked_prefill_equals_transformers(reference: Reference, budget: int) -> None:
    prompt = prompt_of(3 * BLOCK + 1)
    engine = make_engine(reference, max_batch_tokens=budget, max_running=1)
    assert run(engine, greedy(prompt))["r"] == reference.greedy(prompt, NUM_TOKENS)


def test_batch_equals_transformers(reference: Reference) -> None:
    prompts = {str(length): prompt_of(length) for length in LENGTHS}
    engine = make_engine(reference, max_batch_tokens=24, max_running=5)
    answers = run(engine, *(greedy(prompt, name=name) for name, prompt in prompts.items()))
    assert answers == {name: reference.greedy(prompt, NUM_TOKENS) for name, prompt in prompts.items()}


@pytest.mark.parametrize("length", LENGTHS)
def test_prefix_hit_in_memory_equals_transformers(reference: Reference, length: int) -> None:
    prompt = prompt_of(length)
    expected = reference.greedy(prompt, NUM_TOKENS)
    engine = make_engine(reference)
    engine.add(greedy(prompt, name="first"))
    finish(engine, {"first": []})
    engine.add(greedy(prompt, name="second"))
    answers: dict[str, list[int]] = {"second": []}
    output = finish(engine, answers)["second"]
    assert answers["second"] == expected
    assert output.num_local_cached == length // BLOCK * BLOCK


def test_prefix_shared_while_both_run_equals_transformers(llama: Reference) -> None:
    prompt = prompt_of(2 * BLOCK)
    engine = make_engine(llama)
    engine.add(greedy(prompt, name="first"))
    engine.step()
    answers = run(engine, greedy(prompt, name="second"), greedy([*prompt, 5], name="third"))
    assert answers["second"] == llama.greedy(prompt, NUM_TOKENS)
    assert answers["third"] == llama.greedy([*prompt, 5], NUM_TOKENS)


def test_shared_blocks_are_never_written_again(llama: Reference) -> None:
    """A wholly cached prompt computes its last token, whose keys lie in a block that others may read."""
    prompt = prompt_of(2 * BLOCK)
    engine = make_engine(llama)
    run(engine, greedy(prompt, 1, name="first"))
    block = engine.scheduler.pool.match(greedy(prompt).hash_blocks(BLOCK))[1]
    pool_of(engine)[:, :, block, BLOCK - 1] += 1.0
    before = pool_of(engine)[:, :, block].clone()
    run(engine, greedy(prompt, 1, name="second"))
    assert pool_of(engine)[:, :, block].equal(before)


def test_preempted_requests_equal_transformers(reference: Reference) -> None:
    prompts = {str(seed): prompt_of(2 * BLOCK, seed) for seed in range(4)}
    engine = make_engine(reference, num_blocks=10)
    answers = run(engine, *(greedy(prompt, 40, name) for name, prompt in prompts.items()))
    assert answers == {name: reference.greedy(prompt, 40) for name, prompt in prompts.items()}
    assert engine.stats().num_preemptions > 0
    stories = [line for name in prompts for line in engine.scheduler.story(name)]
    assert any("preempted" in line for line in stories)


def test_fragmented_blocks_equal_transformers(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without headroom, sequences that grow in turns are each spread over many runs."""
    monkeypatch.setattr(scheduler, "MIN_YIELD_TOKENS", 0)
    prompts = {str(seed): prompt_of(5, seed) for seed in range(3)}
    engine = make_engine(reference)
    answers = run(engine, *(greedy(prompt, 5 * BLOCK, name) for name, prompt in prompts.items()))
    assert answers == {name: reference.greedy(prompt, 5 * BLOCK) for name, prompt in prompts.items()}
    # and a prompt that continues on those spread blocks is prefilled over several runs
    longer = prompts["1"] + answers["1"] + prompt_of(20, 9)
    assert run(engine, greedy(longer, name="longer"))["longer"] == reference.greedy(longer, NUM_TOKENS)


@pytest.mark.parametrize("length", LENGTHS)
def test_external_load_equals_transformers(reference: Reference, length: int) -> None:
    """A prefill engine saves, a decode engine that never saw the prompt loads and goes on."""
    prompt = prompt_of(length)
    expected = reference.greedy(prompt, NUM_TOKENS)
    prefill_link = DictionaryLink()
    prefill = make_engine(reference, prefill_link)
    request = greedy(prompt, 1, save_tail=True)
    prefill.add(request)
    answers: dict[str, list[int]] = {"r": []}
    output = finish(prefill, answers)["r"]
    assert answers["r"] == expected[:1]
    assert output.num_stored_tokens == length

    decode = make_engine(reference, DictionaryLink(prefill_link.objects))
    decode.add(greedy([*prompt, expected[0]], num_prior_output_tokens=1))
    answers = {"r": []}
    output = finish(decode, answers)["r"]
    assert answers["r"] == expected[1:]
    assert output.num_external_cached == length // BLOCK * BLOCK

    whole = make_engine(reference, DictionaryLink(prefill_link.objects))
    whole.add(greedy(prompt))
    answers = {"r": []}
    output = finish(whole, answers)["r"]
    assert answers["r"] == expected
    assert output.num_external_cached == length
    assert whole.stats().num_prefill_tokens == 1  # the last one, for its logits


def test_local_prefix_then_external_load_equals_transformers(llama: Reference) -> None:
    prompt = prompt_of(4 * BLOCK + 3)
    source = DictionaryLink()
    run(make_engine(llama, source), greedy(prompt, 1, save_tail=True))
    link = DictionaryLink(source.objects)
    engine = make_engine(llama, link, max_batch_tokens=16)
    run(engine, greedy(prompt[: 2 * BLOCK], name="short"))
    engine.add(greedy(prompt, name="long"))
    answers: dict[str, list[int]] = {"long": []}
    output = finish(engine, answers)["long"]
    assert answers["long"] == llama.greedy(prompt, NUM_TOKENS)
    assert (output.num_local_cached, output.num_external_cached) == (2 * BLOCK, 2 * BLOCK + 3)


def test_steps_go_on_while_another_request_loads(llama: Reference) -> None:
    """A step that waited for the layers of a load would move them: this link moves none by itself."""
    prompt, other = prompt_of(3 * BLOCK), prompt_of(20, 7)
    source = DictionaryLink()
    run(make_engine(llama, source), greedy(prompt, 1, save_tail=True))
    link = DictionaryLink(source.objects, is_eager=False)
    engine = make_engine(llama, link)
    answers: dict[str, list[int]] = {"other": [], "loading": []}

    def step() -> None:
        for lookup in link.lookups:
            if not lookup.done:
                link.answer(lookup)
        _, outputs = engine.step()
        engine.check()
        for output in outputs:
            answers[output.request_id] += output.token_ids

    engine.add(greedy(other, name="other"))
    step()
    step()
    engine.add(greedy(prompt, name="loading"))
    step()
    step()
    [load] = link.loads
    link.load_layer(load)
    for _ in range(3):
        num_before = len(answers["other"])
        step()
        assert len(answers["other"]) == num_before + 1 and not answers["loading"]
    assert load.num_layers_loaded == 1, "a step of the other request has waited for the load"
    while not load.done:
        link.load_layer(load)
    step()
    assert len(answers["loading"]) == 1
    for _ in range(NUM_TOKENS):
        step()
    assert answers["loading"] == llama.greedy(prompt, NUM_TOKENS)
    assert answers["other"] == llama.greedy(other, NUM_TOKENS)


def test_a_load_begins_while_a_step_is_computed(llama: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lookup ended during the step; after the step it would join one step later."""
    prompt, other = prompt_of(3 * BLOCK), prompt_of(20, 7)
    source = DictionaryLink()
    run(make_engine(llama, source), greedy(prompt, 1, save_tail=True))
    link = DictionaryLink(source.objects, is_eager=False)
    engine = make_engine(llama, link)
    engine.add(greedy(other, name="other"))
    engine.step()
    link.answer(link.lookups[0])
    engine.step()
    engine.add(greedy(prompt, name="loading"))
    compute = engine.runner.run

    def run_and_answer(*arguments: Any) -> Any:
        link.answer(link.lookups[1])
        assert len(link.loads) == 1, "not begun with the answer"
        while not link.loads[0].done:
            link.load_layer(link.loads[0])
        return compute(*arguments)

    monkeypatch.setattr(engine.runner, "run", run_and_answer)
    assert [output.request_id for output in engine.step()[1]] == ["other"]
    monkeypatch.undo()
    engine.check()
    _, outputs = engine.step()
    answers = {output.request_id: list(output.token_ids) for output in outputs}
    assert answers["loading"] == llama.greedy(prompt, 1)
    engine.check()


def answer_beside_a_step(
    engine: Engine, link: DictionaryLink, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Let the next lookup end ``when``: as the step that began it is computed, or just before."""
    compute, look_up = engine.runner.run, link.lookup

    def run_and_answer(*arguments: Any) -> Any:
        if not link.lookups[-1].done:
            link.answer(link.lookups[-1])
        return compute(*arguments)

    def look_up_at_once(*arguments: Any) -> DictionaryLookup:
        lookup = look_up(*arguments)
        link.answer(lookup)
        return lookup

    if when == "while the step is computed":
        monkeypatch.setattr(engine.runner, "run", run_and_answer)
    elif when == "as the step begins":
        monkeypatch.setattr(link, "lookup", look_up_at_once)


def broken(*arguments: object) -> None:
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize("when", ["while the step is computed", "as the step begins", "behind the step"])
def test_a_load_that_can_not_begin_is_a_miss(
    llama: Reference, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The request is computed, and so are those of the step beside which its load should have begun."""
    prompt, other = prompt_of(3 * BLOCK), prompt_of(20, 7)
    source = DictionaryLink()
    run(make_engine(llama, source), greedy(prompt, 1, save_tail=True))
    link = DictionaryLink(source.objects, is_eager=False)
    engine = make_engine(llama, link)
    engine.add(greedy(other, name="other"))
    engine.step()
    link.answer(link.lookups[0])
    engine.add(greedy(prompt, name="loading"))
    answer_beside_a_step(engine, link, monkeypatch, when)
    monkeypatch.setattr(link, "start_load", broken)
    [output] = engine.step()[1]
    if when == "behind the step":
        link.answer(link.lookups[1])
    answers: dict[str, list[int]] = {"other": list(output.token_ids), "loading": []}
    finished = finish(engine, answers)
    assert answers == {
        "other": llama.greedy(other, NUM_TOKENS),
        "loading": llama.greedy(prompt, NUM_TOKENS),
    }
    assert finished["loading"].num_external_cached == 0
    assert link.lookups[1].is_released and engine.stats().num_failed_loads == 1
    for save in link.saves:
        link.land(save)
    engine.step()
    assert engine.is_idle and engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize("when", ["while the step is computed", "as the step begins"])
def test_a_fault_of_the_engine_beside_a_step_ends_all_requests(
    llama: Reference, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Nothing else would end one that is looking up."""
    link = DictionaryLink(is_eager=False)
    engine = make_engine(llama, link)
    engine.add(greedy(prompt_of(20, 7), name="other"))
    engine.step()
    link.answer(link.lookups[0])
    engine.step()
    engine.add(greedy(prompt_of(3 * BLOCK), name="looking"))
    answer_beside_a_step(engine, link, monkeypatch, when)
    monkeypatch.setattr(engine.scheduler, "lookup_finished", broken)
    assert [output.error for output in engine.step()[1]] == [None]
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.step()
    outputs = engine.fail_all("the engine failed")
    assert {output.request_id for output in outputs} == {"other", "looking"}
    engine.check()


def test_prompts_that_share_a_step_have_parts_of_it_by_their_tokens(llama: Reference) -> None:
    engine = make_engine(llama)
    for name, length in (("a", 60), ("b", 20)):
        engine.add(greedy(prompt_of(length, length), 3, name=name))
    engine.step()
    found = engine.step_log.read()
    assert [(first, num_tokens) for first, num_tokens, _ in found.chunks] == [(0, 60), (0, 20)]
    (*_, longer), (*_, shorter) = found.chunks
    assert longer == pytest.approx(3 * shorter) and shorter > 0
    engine.add(greedy(prompt_of(30, 30), 1, name="beside answers"))
    engine.step()
    assert engine.step_log.read().num_chunks == 2, "a step with tokens of answers says nothing of a prompt"


def test_only_steps_without_a_wait_for_layers_are_logged(llama: Reference) -> None:
    prompt = prompt_of(3 * BLOCK)
    source = DictionaryLink()
    run(make_engine(llama, source), greedy(prompt, 1, save_tail=True))
    link = DictionaryLink(source.objects, is_eager=False)
    for num_layers, num_logged in ((1, 0), (3, 1)):
        engine = make_engine(llama, link)
        engine.add(greedy(prompt, 1))
        engine.step()
        link.answer(link.lookups[-1])
        engine.step()
        for _ in range(num_layers):
            link.load_layer(link.loads[-1])
        engine.step()
        assert engine.step_log.read().num_steps == num_logged, num_layers


def test_loads_are_logged_that_have_arrived(llama: Reference) -> None:
    """One that fails says nothing of the pool's speed; one whose request has gone says as much as others."""
    prompt = prompt_of(3 * BLOCK)
    source = DictionaryLink()
    run(make_engine(llama, source), greedy(prompt, 1, save_tail=True))
    link = DictionaryLink(source.objects)
    engine = make_engine(llama, link)
    run(engine, greedy(prompt, 1, name="arrives"))
    log = engine.step_log.read()
    assert (log.num_loads, log.loads) == (1, [(3 * BLOCK, 0.25)])
    link.fail_at_layer = 1
    engine = make_engine(llama, link)
    run(engine, greedy(prompt, 1, name="fails"))
    assert engine.step_log.read().num_loads == 0
    link = DictionaryLink(source.objects, is_eager=False)
    engine = make_engine(llama, link)
    engine.add(greedy(prompt, 1, name="goes"))
    engine.step()
    link.answer(link.lookups[-1])
    engine.step()
    engine.abort("goes")
    engine.step()
    assert engine.step_log.read().num_loads == 0
    while not link.loads[-1].done:
        link.load_layer(link.loads[-1])
    engine.step()
    engine.step()
    assert engine.step_log.read().loads == [(3 * BLOCK, 0.25)]


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("is_eager", [True, False])
def test_failed_load_is_recomputed_and_disturbs_no_other(
    llama: Reference, layer: int, is_eager: bool
) -> None:
    prompt, other = prompt_of(3 * BLOCK), prompt_of(20, 7)
    longer = prompt + prompt_of(BLOCK + 1, 5)  # fills a block in the step that loads: it must not be stored
    source = DictionaryLink()
    run(make_engine(llama, source), greedy(prompt, 1, save_tail=True))
    link = DictionaryLink(source.objects, is_eager)
    link.fail_at_layer = layer
    engine = make_engine(llama, link)
    engine.add(greedy(other, name="other"))
    engine.add(greedy(longer, name="loading"))
    answers: dict[str, list[int]] = {"other": [], "loading": []}

    def step() -> None:
        _, outputs = engine.step()
        engine.check()
        for output in outputs:
            answers[output.request_id] += output.token_ids

    step()
    for lookup in link.lookups:
        if not lookup.done:
            link.answer(lookup)
    step()
    if not is_eager:
        link.load_layer(link.loads[0])
    for _ in range(200):
        step()
    assert answers["loading"] == llama.greedy(longer, NUM_TOKENS)
    assert answers["other"] == llama.greedy(other, NUM_TOKENS)
    assert engine.stats().num_failed_loads == 1
    # nothing that was computed on missing keys may have been stored
    for block_hash, stored in source.objects.items():
        assert not stored.isnan().any(), block_hash


def test_request_resumed_elsewhere_draws_the_same_tokens(llama: Reference) -> None:
    prompt = prompt_of(21)

    def sampled(tokens: list[int], prior: int) -> list[int]:
        sampling = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
        request = Request(f"r{prior}", tokens, sampling, num_prior_output_tokens=prior)
        return run(make_engine(llama), request)[request.id]

    whole = sampled(prompt, 0)
    assert len(whole) == 24 and len(set(whole)) > 5
    for done in (1, 10, 23):
        assert sampled(prompt + whole[:done], done) == whole[done:]


def test_eos_stops_unless_ignored_or_too_early(llama: Reference) -> None:
    prompt = prompt_of(9)
    expected = llama.greedy(prompt, 8)
    engine = make_engine(llama)
    stop = expected[3]
    first = expected.index(stop)

    def answer(**fields: object) -> tuple[list[int], Output]:
        sampling = SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(stop,), **fields)  # type: ignore[arg-type]
        engine.add(Request("r", prompt, sampling))
        answers: dict[str, list[int]] = {"r": []}
        return answers["r"], finish(engine, answers)["r"]

    tokens, output = answer()
    assert tokens == expected[: first + 1] and output.finish_reason is FinishReason.STOP
    tokens, output = answer(min_tokens=8)
    assert stop not in tokens[:7] and output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_logprobs_equal_transformers(llama: Reference) -> None:
    prompt = prompt_of(12)
    engine = make_engine(llama)
    engine.add(Request("r", prompt, SamplingParams(max_tokens=1, temperature=0, logprobs=3)))
    _, outputs = engine.step()
    assert outputs[0].logprobs is not None
    with torch.no_grad():
        logits = llama.model(torch.tensor([prompt])).logits[0, -1]
    best = torch.log_softmax(logits, -1).topk(3)
    found = outputs[0].logprobs[0]
    assert found.token_id == best.indices[0]
    assert [token for token, _ in found.top] == best.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_come_close(reference: Reference, dtype: str) -> None:
    """Near ties may flip, so logarithms are compared and not tokens."""
    prompt = prompt_of(2 * BLOCK + 5)

    def first_logprobs(name: str) -> dict[int, float]:
        model = load_model(reference.folder, name)
        engine = Engine(InferenceSettings(), TorchRunner(model, new_pool(model, BLOCK, 1 << 20)))
        engine.add(Request("r", prompt, SamplingParams(max_tokens=1, temperature=0, logprobs=20)))
        _, outputs = engine.step()
        assert outputs[0].logprobs is not None
        return dict(outputs[0].logprobs[0].top)

    exact, narrow = first_logprobs("float32"), first_logprobs(dtype)
    best = list(exact)[:5]
    assert [narrow.get(token, -99.0) for token in best] == pytest.approx([exact[t] for t in best], abs=0.5)


def test_contexts_that_share_blocks_are_longer_than_the_memory_they_take(llama: Reference) -> None:
    engine = make_engine(llama)
    prompt = prompt_of(3 * BLOCK + 1)
    engine.add(greedy(prompt, 8, "first"))
    engine.step()
    engine.add(greedy(prompt, 8, "second"))
    engine.step()
    stats = engine.stats()
    assert stats.num_running == 2
    assert 6 * BLOCK < stats.num_context_tokens <= 6 * BLOCK + 4
    assert stats.num_blocks - stats.num_free_blocks == 5, "three are shared"


def test_last_output_of_a_prefill_waits_for_its_saves(llama: Reference) -> None:
    link = DictionaryLink(is_eager=False)
    engine = make_engine(llama, link)
    prompt = prompt_of(2 * BLOCK + 3)
    engine.add(greedy(prompt, 1, save_tail=True))
    engine.step()
    link.answer(link.lookups[0])
    _, outputs = engine.step()
    assert len(outputs) == 0
    assert engine.stats().num_free_blocks < engine.stats().num_blocks
    link.saves[0].done = True  # the store refused everything
    _, outputs = engine.step()
    assert outputs[0].num_stored_tokens == 0 and outputs[0].token_ids == tuple(llama.greedy(prompt, 1))
    engine.check()
    assert engine.is_idle and engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize("how", ["aborted", "failed"])
def test_nothing_is_kept_of_a_prefill_that_ends_while_its_last_output_waits(
    llama: Reference, how: str
) -> None:
    link = DictionaryLink(is_eager=False)
    engine = make_engine(llama, link)
    engine.add(greedy(prompt_of(2 * BLOCK + 3), 1, save_tail=True))
    engine.step()
    link.answer(link.lookups[0])
    assert engine.step()[1] == []
    if how == "aborted":
        engine.abort("r")
        outputs = engine.step()[1]
    else:
        outputs = engine.fail_all("the engine failed")
    assert [output.request_id for output in outputs] == ["r"]
    link.land(link.saves[0])
    engine.step()
    engine.check()
    assert engine.is_idle and engine.stats().num_free_blocks == engine.stats().num_blocks
    assert engine._traffic is not None and not engine._traffic._stored


def test_abort_keeps_blocks_while_they_are_loaded(llama: Reference) -> None:
    source = DictionaryLink()
    prompt = prompt_of(3 * BLOCK)
    run(make_engine(llama, source), greedy(prompt, 1, save_tail=True))
    link = DictionaryLink(source.objects, is_eager=False)
    engine = make_engine(llama, link)
    engine.add(greedy(prompt))
    engine.step()
    link.answer(link.lookups[0])
    engine.step()
    engine.abort("r")
    _, outputs = engine.step()
    engine.check()
    assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
    assert engine.stats().num_free_blocks == engine.stats().num_blocks - 3
    for _ in range(3):
        link.load_layer(link.loads[0])
    engine.step()
    engine.check()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks and engine.is_idle


def test_abort_while_looking_up_releases_the_lookup(llama: Reference) -> None:
    link = DictionaryLink(is_eager=False)
    engine = make_engine(llama, link)
    engine.add(greedy(prompt_of(40)))
    engine.step()
    engine.abort("r")
    engine.step()
    engine.check()
    assert link.lookups[0].is_released and engine.is_idle


def test_broken_step_ends_its_requests_and_the_engine_goes_on(llama: Reference) -> None:
    class BrokenLink(DictionaryLink):
        is_broken = True

        def save_layer(self, save: DictionarySave, layer: int) -> None:
            if self.is_broken and layer == 1:
                raise RuntimeError("broken on purpose")
            super().save_layer(save, layer)

    link = BrokenLink()
    engine = make_engine(llama, link)
    prompt = prompt_of(2 * BLOCK)
    engine.add(greedy(prompt, name="victim"))
    output = finish(engine, {"victim": []})["victim"]
    assert output.finish_reason is FinishReason.ERROR and "broken on purpose" in str(output.error)
    assert link.objects == {} and engine.is_idle
    link.is_broken = False
    assert run(engine, greedy(prompt, name="next"))["next"] == llama.greedy(prompt, NUM_TOKENS)


def test_what_a_step_had_ended_before_it_broke_is_reported(
    llama: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(llama)
    engine.add(greedy(prompt_of(BLOCK), name="aborted"))
    engine.step()
    engine.add(greedy(prompt_of(BLOCK), name="other"))
    engine.abort("aborted")

    def broken(now: float) -> None:
        raise RuntimeError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", broken)
        with pytest.raises(RuntimeError, match="on purpose"):
            engine.step()
    ended = {output.request_id: output.finish_reason for output in engine.fail_all("broken")}
    assert ended == {"aborted": FinishReason.ABORT, "other": FinishReason.ERROR}
    assert engine.fail_all("again") == [] and engine.is_idle


def test_requests_of_one_answer_are_computed_by_one_version(llama: Reference) -> None:
    """Also those that were added at once, between which the engine began a step and then learnt of a flip."""
    engine = make_engine(llama)
    engine.weights = "old"

    class Flip:
        ends_requests: Refusal | None = None

        def apply(self) -> None:
            engine.weights = "new"

        def ended(self, error: Exception | None) -> None:
            assert error is None

    both, alone = AnswerWeights(), AnswerWeights()
    engine.add(greedy(prompt_of(20), 2, "first", weights=both))
    engine.step()
    engine.add(greedy(prompt_of(20), 2, "second", weights=both))
    engine.add(greedy(prompt_of(20), 2, "alone", weights=alone))
    engine.change_when_quiet(Flip())
    finished = finish(engine, {"first": [], "second": [], "alone": []})
    assert (finished["first"].weights, finished["alone"].weights) == ("old", "new")
    assert (finished["second"].error_code, finished["second"].token_ids) == ("weights_replaced", ())
    assert (both.digest, alone.digest) == ("old", "new")


def test_refusals_are_values(llama: Reference) -> None:
    engine = make_engine(llama, num_blocks=4, max_waiting=1)
    refused = engine.add(greedy(prompt_of(3 * BLOCK + 1), name="long"))
    assert isinstance(refused, Refusal) and refused.code == "context_length_exceeded"
    assert engine.add(greedy(prompt_of(5), name="a")) is None
    refused = engine.add(greedy(prompt_of(5), name="b"))
    assert isinstance(refused, Refusal) and refused.code == "queue_full"
    with pytest.raises(InvalidArgument, match="request_id"):
        engine.add(greedy(prompt_of(5), name="a"))
    with pytest.raises(InvalidArgument, match="ids from 0"):
        engine.add(greedy([5, 10**6], name="c"))


def test_a_request_that_was_queued_is_not_refused_in_a_step(llama: Reference) -> None:
    """Others were queued after the step had taken what had arrived, and before that waited for its turn."""
    engine = make_engine(llama, max_running=1, max_waiting=2)
    late = ["c", "d"]

    def now() -> float:
        while late:
            assert engine.add(greedy(prompt_of(5), 2, late.pop(0))) is None
        return 0.0

    for name in "ab":
        assert engine.add(greedy(prompt_of(5), 2, name)) is None
    engine._clock = now
    finished = finish(engine, {name: [] for name in "abcd"})
    assert {output.finish_reason for output in finished.values()} == {FinishReason.LENGTH}


def test_a_request_that_waits_for_a_change_may_be_handed_over(llama: Reference) -> None:
    engine = make_engine(llama)

    class Flip:
        ends_requests: Refusal | None = None
        is_applied = False

        def apply(self) -> None:
            self.is_applied = True

        def ended(self, error: Exception | None) -> None:
            assert error is None

    engine.add(greedy(prompt_of(20), 6, "old"))
    engine.step()
    flip = Flip()
    engine.change_when_quiet(flip)
    for name in ("leaving", "staying"):
        engine.add(greedy(prompt_of(20), 3, name))
    engine.step()
    engine.hand_over("leaving", "t")
    _, outputs = engine.step()
    reasons = {output.request_id: output.finish_reason for output in outputs}
    assert reasons == {"leaving": FinishReason.MOVED, "old": None} and not flip.is_applied
    finished = finish(engine, {"old": [], "staying": []})
    assert {output.finish_reason for output in finished.values()} == {FinishReason.LENGTH}
    assert flip.is_applied


def test_answer_ends_when_the_whole_pool_is_used(llama: Reference) -> None:
    prompt = prompt_of(2 * BLOCK)
    engine = make_engine(llama, num_blocks=4)
    answer = run(engine, greedy(prompt, 200))["r"]
    assert answer == llama.greedy(prompt, BLOCK + 1)


def test_events_report_what_is_cached(llama: Reference) -> None:
    engine = make_engine(llama, num_blocks=6)
    prompt = prompt_of(2 * BLOCK)
    run(engine, greedy(prompt, 1))
    stored = engine.drain_events()
    assert [type(event) for event in stored] == [PoolBlocksStored]
    first = stored[0]
    assert isinstance(first, PoolBlocksStored) and first.token_ids == tuple(prompt)
    run(engine, greedy(prompt_of(4 * BLOCK, 3), 1, name="other"))
    removed = [event for event in engine.drain_events() if isinstance(event, PoolBlocksRemoved)]
    assert removed and removed[0].hashes[0] == first.hashes[1]  # the tail of a prefix goes first


class FickleLink(DictionaryLink):
    """A link that answers late, loads layer by layer, fails one load in four, and stores at random times."""

    def __init__(self, random: Random, objects: Objects) -> None:
        super().__init__(objects, is_eager=False)
        self.random = random
        self.num_failed = 0

    def load_layer(self, load: DictionaryLoad) -> None:
        if self.random.random() < 0.1:
            load.failed = True
            self.num_failed += 1
        else:
            super().load_layer(load)

    def act(self) -> None:
        for lookup in self.lookups:
            if not lookup.done and self.random.random() < 0.5:
                self.answer(lookup)
        for load in self.loads:
            if not load.done and self.random.random() < 0.5:
                self.load_layer(load)
        for save in self.saves:
            if save.is_finished and not save.done and self.random.random() < 0.3:
                self.land(save)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_goes_wrong_together(llama: Reference, seed: int) -> None:
    """Shared prefixes, a small pool, preemption, a fickle cache and aborts, all at once."""
    random = Random(seed)
    source = DictionaryLink()
    stems = [prompt_of(5 * BLOCK, family) for family in range(4)]
    stored = [greedy(stem, 1, f"stem{family}", save_tail=True) for family, stem in enumerate(stems)]
    run(make_engine(llama, source), *stored)
    objects = source.objects
    links = [FickleLink(random, objects) for _ in range(2)]
    engines = [make_engine(llama, link, num_blocks=16, max_batch_tokens=40, max_running=5) for link in links]
    expected: dict[str, list[int]] = {}
    answers: dict[str, list[int]] = {}
    ended: dict[str, FinishReason] = {}
    for index in range(24):
        stem = random.choice(stems)
        prompt = stem[: random.randint(1, len(stem))] + prompt_of(random.randint(1, 20), index % 3)
        num_tokens = random.randint(1, 40)
        expected[f"r{index}"] = llama.greedy(prompt, num_tokens)
        answers[f"r{index}"] = []
        is_prefill = random.random() < 0.3
        request = greedy(prompt, num_tokens, f"r{index}", save_tail=is_prefill)
        assert engines[index % 2].add(request) is None
    for _ in range(3000):
        for engine, link in zip(engines, links, strict=True):
            link.act()
            for output in engine.step()[1]:
                answers[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    ended[output.request_id] = output.finish_reason
            engine.check()
        if random.random() < 0.01:
            engines[0].abort(f"r{random.randrange(24)}")
            engines[1].abort(f"r{random.randrange(24)}")
        if all(engine.is_idle for engine in engines):
            break
    assert ended.keys() == expected.keys()
    for name, reason in ended.items():
        answer = answers[name]
        assert answer == expected[name][: len(answer)], name
        assert reason is FinishReason.ABORT or len(answer) == len(expected[name]), name
    assert all(engine.stats().num_free_blocks == engine.stats().num_blocks for engine in engines)
    assert links[0].num_failed + links[1].num_failed > 0


def test_salt_keeps_tenants_apart(llama: Reference) -> None:
    engine = make_engine(llama)
    prompt = prompt_of(3 * BLOCK)
    run(engine, greedy(prompt, salt="a"))
    engine.add(greedy(prompt, salt="b"))
    assert finish(engine, {"r": []})["r"].num_local_cached == 0


def test_thread_sleeps_wakes_and_stops(llama: Reference) -> None:
    collected: dict[str, list[int]] = {}
    all_done = threading.Event()

    def on_step(outputs: Sequence[Output], events: Sequence[BlockEvent]) -> None:
        for output in outputs:
            collected.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None and output.request_id == "last":
                all_done.set()

    engine = make_engine(llama, DictionaryLink())
    thread = EngineThread(engine, on_step)
    thread.start()
    prompt = prompt_of(18)
    for name in ("first", "last"):
        assert engine.add(greedy(prompt, name=name)) is None
    assert all_done.wait(30)
    assert collected["last"] == llama.greedy(prompt, NUM_TOKENS)
    assert thread.stop()
    assert engine.is_idle


def test_stop_waits_for_saves(llama: Reference) -> None:
    link = DictionaryLink(is_eager=False)
    engine = make_engine(llama, link)
    stepped = threading.Event()
    thread = EngineThread(engine, lambda outputs, events: stepped.set())
    thread.start()
    engine.add(greedy(prompt_of(2 * BLOCK), 1))
    deadline = time.monotonic() + 30
    while not link.lookups and time.monotonic() < deadline:
        time.sleep(0.01)
    link.answer(link.lookups[0])
    assert stepped.wait(30)
    assert not thread.stop(timeout_s=0.2), "the pool is still being read"
    link.land(link.saves[0])
    assert thread.stop()
    assert engine.is_idle


def test_broken_link_fails_its_requests_only(llama: Reference) -> None:
    class BrokenLink(DictionaryLink):
        def lookup(self, blocks: object) -> DictionaryLookup:
            raise RuntimeError("broken on purpose")

    ended: list[Output] = []
    has_ended = threading.Event()

    def on_step(outputs: Sequence[Output], events: Sequence[BlockEvent]) -> None:
        ended.extend(outputs)
        has_ended.set()

    engine = make_engine(llama, BrokenLink())
    thread = EngineThread(engine, on_step)
    thread.start()
    engine.add(greedy(prompt_of(2 * BLOCK)))
    assert has_ended.wait(30)
    assert "broken on purpose" in str(ended[0].error)
    assert thread.stop() and engine.is_idle


def test_stop_ends_running_requests(llama: Reference) -> None:
    ended: list[Output] = []
    started = threading.Event()

    def on_step(outputs: Sequence[Output], events: Sequence[BlockEvent]) -> None:
        started.set()
        ended.extend(output for output in outputs if output.finish_reason is not None)

    engine = make_engine(llama)
    thread = EngineThread(engine, on_step)
    thread.start()
    engine.add(greedy(prompt_of(8), 400))
    assert started.wait(30)
    assert thread.stop()
    assert [output.finish_reason for output in ended] == [FinishReason.ERROR]
    assert "stopping" in str(ended[0].error)


@pytest.mark.model
@pytest.mark.timeout(1200)
def test_prompts_of_up_to_4000_tokens_to_the_demo_model(request: pytest.FixtureRequest) -> None:
    """One after another in whole chunks; the short ones in small chunks, each batched with the others."""
    folder = resolve_model("smollm2")
    prompts = corpus.prompts(folder)
    assert (len(prompts[0]), len(prompts[-1])) == (1, 4000)
    # On a busy machine, threads that wait for each other after every layer take a hundred times as long.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = corpus.reference(folder, request.config)
        corpus.compare(answers_of(InferenceSettings(), folder, prompts, together=False), expected)
        small = InferenceSettings(max_batch_tokens=100)
        short = answers_of(small, folder, prompts[: corpus.NUM_SHORT], together=True)
        corpus.compare(short, expected[: corpus.NUM_SHORT])
    finally:
        torch.set_num_threads(before)


def answers_of(
    settings: InferenceSettings, folder: Path, prompts: list[list[int]], together: bool
) -> corpus.Answers:
    model = load_model(folder, "float32")
    engine = Engine(settings, TorchRunner(model, new_pool(model, 32, 1 << 30)))
    answers: dict[str, list[int]] = {}

    def run_until_idle() -> None:
        while not engine.is_idle:
            _, outputs = engine.step()
            for output in outputs:
                answers.setdefault(output.request_id, []).extend(output.token_ids)

    # min_tokens, as the reference is made with, keeps the end-of-sequence token out on both sides.
    sampling = SamplingParams(max_tokens=corpus.NUM_NEW, min_tokens=corpus.NUM_NEW, temperature=0.0)
    for number, prompt in enumerate(prompts):
        assert engine.add(Request(str(number), prompt, sampling)) is None
        if not together:
            run_until_idle()
    run_until_idle()
    engine.check()
    return [answers[str(number)] for number in range(len(prompts))]
