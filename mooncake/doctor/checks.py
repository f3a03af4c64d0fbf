# SPDX-License-Identifier: Apache-2.0
"""Facts in, findings out: the checks of every link of a deployment.

It owns the judgement and opens no socket. A check states a fault only from facts that are known, and leaves
out what follows from another finding: an engine that does not answer is one finding, not ten.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from mooncake.doctor.facts import (
    EngineFacts,
    EngineKind,
    Expectations,
    Facts,
    GatewayFacts,
    InstanceFacts,
    PublisherFacts,
    Reach,
    Shot,
    Trouble,
)
from mooncake.doctor.findings import DoctorFinding, Severity, finding

MIN_SHARED_MEMORY_BYTES = 1 << 30
MIN_LOCKED_MEMORY_BYTES = 1 << 30
MAX_NAMES = 8
"""Instances that one finding names."""

MIN_PROMPTS = 20
"""Prompts after which the mean of their lengths counts as typical."""

CONFIDENCE_GAP = 1.0
"""Difference of log probabilities that no rounding explains."""

CONFIDENT = -0.7
"""Log probability of a token that has half of the probability: rounding makes no other one of it."""

_IGNORES_CACHE = ("load", "round_robin", "random")
_NEAR = 0.5
"""Share of the promised disk speed below which the promise counts as broken."""

CAUSES = (
    "block_size_differs",
    "hash_algorithm_differs",
    "hash_seed_differs",
    "cache_dtype_differs",
    "kv_identity_differs",
)
"""Differences of which ``pool_not_shared`` is the consequence."""

Findings = Iterator[DoctorFinding]


def examine(facts: Facts, expected: Expectations) -> list[DoctorFinding]:
    """All findings, one of a code at a place: the worst first, then in the order of the checks."""
    found: list[DoctorFinding] = []
    for check in CHECKS:
        found += check(facts, expected)
    first: dict[tuple[str, str], DoctorFinding] = {}
    is_explained = any(one.code in CAUSES for one in found)
    for one in found:
        if one.code == "pool_not_shared" and is_explained:
            continue
        first.setdefault((one.code, one.where), one)
    order = [*Severity]
    return sorted(first.values(), key=lambda one: order.index(one.severity))


# --- gateway and conductor


def check_gateway(facts: Facts, expected: Expectations) -> Findings:
    gateway = facts.gateway
    if gateway is None:
        return
    if not gateway.reach.is_fine:
        yield _unreached("gateway_unreachable", gateway.address, gateway.reach)
        return
    if gateway.key_refused:
        yield finding("client_key_refused", gateway.address, gateway.key_refused)
        return
    if gateway.status_refused:
        yield finding("status_hidden", gateway.address, gateway.status_refused)
    if gateway.instances == []:
        return
    yield from _check_path(gateway)
    shots = (("first", gateway.first), ("second", gateway.second))
    failed = next(((name, one) for name, one in shots if one is not None and not one.is_answered), None)
    if failed is not None:
        yield finding("gateway_request_failed", gateway.address, _failure(failed[1], failed[0]))
        return
    yield from _check_repeat(gateway.address, gateway.first, gateway.second, None)


def _check_path(gateway: GatewayFacts) -> Findings:
    if {row.role for row in gateway.instances or []} != {"prefill", "decode"}:
        return  # one kind of instance that does both is a choice
    if gateway.degraded:
        yield finding("path_degraded", gateway.address, gateway.degraded)
        return
    route = next((one.route for one in (gateway.second, gateway.first) if one and one.route), "")
    if route.startswith("degraded"):
        yield finding("path_degraded", gateway.address, f"the answer's X-Mooncake-Route: {route}")


def check_conductor(facts: Facts, expected: Expectations) -> Findings:
    gateway = facts.gateway
    if gateway is None or gateway.instances is None:
        return
    yield from _check_conductors(gateway)
    if not gateway.instances:
        yield finding("no_instance", gateway.address, "its list of instances is empty")
    by_address = {one.address: one for one in facts.engines}
    # One that was named with --engine is meant to run.
    absent = [row for row in gateway.absent if row.address not in by_address]
    if absent:
        yield finding("instances_not_started", gateway.address, _names(absent, gateway.instances))
    for row in gateway.instances:
        if row.health in ("down", "suspect", "starting") and row not in absent:
            yield finding("instance_not_ready", row.address, f"{row.role}, {row.health}: {row.detail}")
    if gateway.scheduling in _IGNORES_CACHE:
        yield finding("scheduling_ignores_cache", gateway.address, f"scheduling is {gateway.scheduling}")
    for row in gateway.instances:
        engine = by_address.get(row.address)
        if engine is None or not _has_computed(engine) or row.health != "ready":
            continue
        publishes = any(one.num_batches for one in engine.publishers or [])
        if row.is_silent and engine.publishers:
            seen = f"it names {engine.publishers[0].endpoint}, and the conductor infers its blocks"
            yield finding("index_without_events", row.address, seen)
        elif row.num_blocks == 0 and publishes:
            yield finding("index_empty", row.address, "0 blocks in the gateway's status after the canary")


def _check_conductors(gateway: GatewayFacts) -> Findings:
    lost = [address for address, is_connected in gateway.conductors.items() if not is_connected]
    num = len(gateway.conductors)
    if lost and len(lost) == num:
        yield finding("conductor_unreachable", gateway.address, gateway.conductor or ", ".join(lost))
        return
    for address in lost:
        seen = f"{gateway.address} reaches {num - len(lost)} of {num} conductors, and not this one"
        yield finding("conductor_lost", address, seen)


def _names(absent: Sequence[InstanceFacts], rows: Sequence[InstanceFacts]) -> str:
    """Numbers of absent instances by role, their first addresses, and why the first one is not ready."""
    of_role = Counter(row.role for row in rows)
    counts = [f"{num} of {of_role[role]} {role}" for role, num in Counter(row.role for row in absent).items()]
    names = ", ".join(row.address for row in absent[:MAX_NAMES])
    more = f" and {len(absent) - MAX_NAMES} more" if len(absent) > MAX_NAMES else ""
    return f"{', '.join(counts)}: {names}{more}; the first: {absent[0].detail}"


def _has_computed(engine: EngineFacts) -> bool:
    return engine.first is not None and engine.first.is_answered


# --- engines


def check_engines(facts: Facts, expected: Expectations) -> Findings:
    for engine in facts.engines:
        if not engine.reach.is_fine:
            yield _unreached("engine_unreachable", engine.address, engine.reach)
            continue
        yield from _check_engine(engine, expected)


def _check_engine(engine: EngineFacts, expected: Expectations) -> Findings:
    where = engine.address
    if engine.has_prefix_cache is False:
        yield finding("prefix_caching_off", where, "its configuration says that prefix caching is off")
    shots = (("first", engine.first), ("second", engine.second))
    failed = next(((name, one) for name, one in shots if one is not None and not one.is_answered), None)
    if failed is not None:
        code = "client_key_refused" if failed[1].status in (401, 403) else "engine_request_failed"
        yield finding(code, where, _failure(failed[1], failed[0]))
    elif engine.has_prefix_cache is not False:
        yield from _check_repeat(where, engine.first, engine.second, engine.block_tokens)
    salted = engine.other_salt
    if salted is not None and salted.is_answered and salted.cached_tokens:
        seen = f"{salted.cached_tokens} of {salted.prompt_tokens} tokens were cached under another salt"
        yield finding("salt_ignored", where, seen)
    if engine.block_tokens:
        yield from _check_prompt_lengths(engine, engine.block_tokens, expected)
    if engine.num_waiting and engine.usage is not None and engine.usage > 0.95:
        seen = f"{engine.usage:.0%} of its KV memory is in use, {engine.num_waiting} requests wait"
        yield finding("requests_wait", where, seen)


def _check_repeat(where: str, first: Shot | None, second: Shot | None, block_tokens: int | None) -> Findings:
    if second is None or not second.is_answered:
        return
    if second.cached_tokens is None:
        yield finding("cached_tokens_hidden", where, "usage.prompt_tokens_details.cached_tokens is absent")
    if block_tokens is not None and second.prompt_tokens <= block_tokens:
        return  # the prompt can't have a whole block before its last token
    if second.reused == 0:
        seen = f"0 of {second.prompt_tokens} prompt tokens were cached the second time"
        yield finding("repeat_not_cached", where, seen)


def _check_prompt_lengths(engine: EngineFacts, block_tokens: int, expected: Expectations) -> Findings:
    if 0 < expected.prompt_tokens < block_tokens:
        seen = f"prompts have {expected.prompt_tokens} tokens, a block {block_tokens}"
        yield finding("prompt_shorter_than_block", engine.address, seen)
    elif engine.num_prompts >= MIN_PROMPTS and (engine.mean_prompt_tokens or block_tokens) < block_tokens:
        seen = f"its {engine.num_prompts} prompts have {engine.mean_prompt_tokens:.0f} tokens on average"
        yield finding("prompt_shorter_than_block", engine.address, f"{seen}, a block {block_tokens}")


def check_engines_together(facts: Facts, expected: Expectations) -> Findings:
    """Differences between engines that should be equal."""
    alive = [one for one in facts.engines if one.reach.is_fine]
    gateway = facts.gateway
    if gateway is not None and gateway.instances is not None and gateway.is_ours:
        behind = {row.address for row in gateway.instances}
        models = [one for one in alive if one.address in behind and one.models]
        yield from _differ("models_differ", models, lambda one: ", ".join(sorted(one.models)))
        yield from _check_own_blocks(gateway, alive)
    for _, of_kind in itertools.groupby(sorted(alive, key=lambda one: one.kind), lambda one: one.kind):
        versions = [one for one in of_kind if one.version]
        yield from _differ("versions_differ", versions, lambda one: one.version)
    own = [one for one in alive if one.kind is EngineKind.OWN and one.version]
    gateway_version = gateway.version if gateway is not None and gateway.is_ours else ""
    if (
        gateway is not None
        and gateway_version
        and own
        and gateway_version not in {one.version for one in own}
    ):
        seen = f"the gateway has {gateway_version}, {own[0].address} {own[0].version}"
        yield finding("versions_differ", gateway.address, seen)
    yield from _check_answers(alive)
    if shares_blocks(facts, expected):
        yield from _check_names_of_blocks(alive)


def _check_own_blocks(gateway: GatewayFacts, alive: Sequence[EngineFacts]) -> Findings:
    for engine in alive:
        sizes = (gateway.block_tokens, engine.block_tokens)
        if engine.kind is EngineKind.OWN and None not in sizes and sizes[0] != sizes[1]:
            seen = f"its blocks have {sizes[1]} tokens, the gateway's {sizes[0]}"
            yield finding("block_size_differs", engine.address, seen)


def _check_names_of_blocks(alive: Sequence[EngineFacts]) -> Findings:
    """What decides whether one engine finds the blocks of another."""
    by_size = [one for one in alive if one.block_tokens]
    differ = list(_differ("block_size_differs", by_size, lambda one: f"{one.block_tokens} tokens"))
    yield from differ
    vllm = [one for one in alive if one.kind is EngineKind.VLLM]
    algorithms = [one for one in vllm if one.hash_algorithm]
    algorithms_differ = list(_differ("hash_algorithm_differs", algorithms, lambda one: one.hash_algorithm))
    yield from algorithms_differ
    dtypes = [one for one in vllm if one.cache_dtype]
    yield from _differ("cache_dtype_differs", dtypes, lambda one: one.cache_dtype)
    identities = [one for one in alive if one.kv_identity]
    if not differ:
        yield from _differ("kv_identity_differs", identities, lambda one: one.kv_identity[:16])
    if differ or algorithms_differ:
        return
    seeds = [one for one in vllm if one.hash_seed is not None]
    seeds_differ = list(
        _differ("hash_seed_differs", seeds, lambda one: f"PYTHONHASHSEED={one.hash_seed or 'unset'}")
    )
    if seeds_differ:
        yield from seeds_differ
        return
    named = [one for one in vllm if _hashes(one)]
    yield from _differ(
        "hash_seed_differs", named, lambda one: f"the same tokens are block {_hashes(one)[0][:16]}"
    )


def _hashes(engine: EngineFacts) -> tuple[str, ...]:
    return next((one.canary_hashes for one in engine.publishers or [] if one.canary_hashes), ())


def _check_answers(alive: Sequence[EngineFacts]) -> Findings:
    """Compare first tokens of answers to the same prompt with those of the first engine with these models."""
    reference: dict[tuple[str, ...], EngineFacts] = {}
    for engine in alive:
        shot = engine.first
        if shot is None or not shot.is_answered:
            continue
        base = reference.setdefault(engine.models, engine)
        assert base.first is not None
        if base is not engine and are_other_weights(base.first, shot):
            seen = f"{shot.text[:20]!r} here, {base.first.text[:20]!r} at {base.address}"
            if shot.logprob is not None and base.first.logprob is not None:
                seen += f"; log probabilities {shot.logprob:.2f} and {base.first.logprob:.2f}"
            yield finding("answers_differ", engine.address, seen)


def are_other_weights(one: Shot, other: Shot) -> bool:
    """Whether two answers differ by more than rounding explains."""
    if one.logprob is None or other.logprob is None:
        return one.text != other.text
    if one.text == other.text:
        return abs(one.logprob - other.logprob) > CONFIDENCE_GAP
    return min(one.logprob, other.logprob) > CONFIDENT


def shares_blocks(facts: Facts, expected: Expectations) -> bool:
    """Whether blocks of one engine are meant to be found by another."""
    return expected.shares_store or any(one.kv_identity for one in facts.engines)


# --- connectors


def check_connectors(facts: Facts, expected: Expectations) -> Findings:
    alive = [one for one in facts.engines if one.reach.is_fine]
    shares = shares_blocks(facts, expected)
    missing = {one.address for one in alive if (shares or _hands_over(facts, one)) and _has_no_connector(one)}
    for engine in alive:
        if engine.address in missing:
            seen = "it has never looked for a prompt outside its own memory"
            if engine.kind is EngineKind.OWN:
                seen = "it names no identity of blocks in a store"
            yield finding("connector_missing", engine.address, seen)
        wrong = {"prefill": "kv_consumer", "decode": "kv_producer"}.get(engine.role)
        if wrong is not None and engine.connector_role == wrong:
            seen = f"{engine.role} with kv_role {engine.connector_role}"
            yield finding("connector_role", engine.address, seen)
    if shares:
        yield from _check_pool(facts, [one for one in alive if one.address not in missing])
    yield from _check_decode(facts)


def _hands_over(facts: Facts, engine: EngineFacts) -> bool:
    """Whether this engine is one side of a disaggregated pair behind our gateway."""
    rows = facts.gateway.instances if facts.gateway is not None else None
    if not rows or {row.role for row in rows} != {"prefill", "decode"}:
        return False
    return engine.kind is EngineKind.VLLM and engine.role == "decode"


def _has_no_connector(engine: EngineFacts) -> bool:
    if engine.connectors is not None:
        return not engine.connectors
    if engine.kind is EngineKind.OWN:
        return not engine.kv_identity
    if engine.kind is EngineKind.VLLM:
        return engine.has_external_lookups is False and _has_computed(engine)
    return False


def _check_pool(facts: Facts, engines: Sequence[EngineFacts]) -> Findings:
    """Judge what one engine found of another one's prompt."""
    crossed = [one for one in engines if one.crossed_tokens is not None]
    found_some = {one.address for one in crossed if one.crossed_tokens}
    store = facts.store
    # A store that takes nothing is a finding of its own.
    takes = store is not None and store.reach.is_fine and not store.put_refusal and store.capacity_bytes > 0
    for engine in engines:
        if takes and engine.store_growth == 0 and engine.address not in found_some:
            seen = "the store had no more objects after a new prompt of several blocks"
            yield finding("pool_not_written", engine.address, seen)
        elif engine.crossed_tokens == 0 and (store is None or takes):
            source = next(one.address for one in facts.engines if one.first is not None)
            yield finding("pool_not_shared", engine.address, f"0 tokens of the prompt that {source} computed")


def _check_decode(facts: Facts) -> Findings:
    shot = facts.gateway.first if facts.gateway is not None else None
    if shot is None or not shot.is_answered or not shot.prefill or shot.prefill == shot.decode:
        return
    if shot.counted_hits == 0 and not shot.counted_external_hits:
        seen = f"0 of {shot.prompt_tokens} prompt tokens came from {shot.prefill}"
        yield finding("decode_without_kv", shot.decode, seen)


# --- events


def check_events(facts: Facts, expected: Expectations) -> Findings:
    for engine in facts.engines:
        if not engine.reach.is_fine:
            continue
        if engine.publishers is None:
            yield finding("events_unknown", engine.address, "GET /kv_event_sources is not answered")
        elif not engine.publishers:
            if engine.has_prefix_cache is not False:
                is_routed = facts.gateway is not None or bool(expected.events_topic)
                code = "events_off" if is_routed else "events_absent"
                yield finding(code, engine.address, "it names no publisher")
        else:
            for publisher in engine.publishers:
                yield from _check_publisher(engine, publisher, facts, expected)


def _check_publisher(
    engine: EngineFacts, publisher: PublisherFacts, facts: Facts, expected: Expectations
) -> Findings:
    where = f"{engine.address} ({publisher.endpoint})"
    if publisher.num_unreadable:
        yield finding("events_unreadable", where, publisher.problem)
        return
    if not publisher.num_batches:
        is_expected = _has_computed(engine) and engine.has_prefix_cache is not False
        if is_expected and not _is_followed(engine, publisher, facts):
            yield finding(
                "events_not_flowing", where, publisher.problem or "no event arrived while it computed"
            )
        return
    wanted = expected.events_topic
    if wanted and publisher.topics and not any(one.startswith(wanted) for one in publisher.topics):
        seen = f"topic {publisher.topics[0]!r}, subscribed is {wanted!r}"
        yield finding("events_wrong_topic", where, seen)
    if publisher.replay_answers is False:
        seen = publisher.replay_endpoint or "it names no replay endpoint"
        yield finding("events_not_replayable", where, seen)


def _is_followed(engine: EngineFacts, publisher: PublisherFacts, facts: Facts) -> bool:
    """Whether the conductor has what does not come here: this publisher connects to its subscriber."""
    if not publisher.may_connect or facts.gateway is None:
        return False
    rows = facts.gateway.instances or []
    return any(row.address == engine.address and row.num_blocks and not row.is_silent for row in rows)


# --- store and host


def check_store(facts: Facts, expected: Expectations) -> Findings:
    store = facts.store
    if store is None:
        return
    if not store.reach.is_fine:
        yield _unreached("master_unreachable", store.address, store.reach, denied="master_denied")
        return
    if store.capacity_bytes == 0:
        yield finding("store_without_memory", store.address, f"{store.num_segments} segments with 0 bytes")
        return
    for segment in store.idle_segments:
        yield finding("segment_not_ready", store.address, segment)
    if store.num_wrong_reports:
        yield finding("reports_of_wrong_bytes", store.address, f"{store.num_wrong_reports} reports")
    if store.put_refusal:
        used = f"{store.allocated_bytes} of {store.capacity_bytes} bytes are allocated"
        code = "store_full" if store.num_writable else "store_not_writable"
        if store.put_refusal_code == "storage_error":
            code = "store_log_unwritable"
        yield finding(code, store.address, f"{store.put_refusal}; {used}")
    elif store.is_read_back is False:
        yield finding("store_object_lost", store.address, store.object_problem or "the object was not found")
    for code, seen in (("durable_put_fails", store.ssd_failures), ("durable_put_slow", store.ssd_delays)):
        for segment, what in seen.items():
            yield finding(code, f"{store.address} ({segment})", what)


def check_hosts(facts: Facts, expected: Expectations) -> Findings:
    processes: list[EngineFacts | GatewayFacts] = [*facts.engines]
    processes += [facts.gateway] if facts.gateway is not None else []
    for one in processes:
        if one.clock_skew_s is not None and abs(one.clock_skew_s) > expected.max_skew_s:
            direction = "ahead" if one.clock_skew_s > 0 else "behind"
            seen = f"its clock is {abs(one.clock_skew_s):.0f} s {direction}"
            yield finding("clock_skew", one.address, seen)
        if one.max_files is not None and one.max_files < expected.min_files:
            yield finding("few_file_descriptors", one.address, f"it may open {one.max_files} files")
    host = facts.host
    if host is None:
        return
    if host.disk_problem:
        yield finding("disk_slow", host.disk, host.disk_problem)
    elif host.disk_bytes_per_s is not None and host.disk_bytes_per_s < _NEAR * expected.disk_bytes_per_s:
        speeds = [f"{speed / 1e6:.0f} MB/s" for speed in (host.disk_bytes_per_s, expected.disk_bytes_per_s)]
        yield finding("disk_slow", host.disk, f"{speeds[0]}, promised {speeds[1]}")
    if not host.is_of_cluster:
        return
    shared = host.shared_memory_bytes
    if shared is not None and shared < MIN_SHARED_MEMORY_BYTES:
        yield finding("little_shared_memory", "/dev/shm", f"{shared / 2**20:.0f} MiB")
    if host.num_huge_pages == 0 and facts.store is not None:
        yield finding("no_huge_pages", "this host", "HugePages_Total is 0 in /proc/meminfo")
    locked = host.locked_memory_bytes
    if host.num_rdma_devices and locked is not None and 0 <= locked < MIN_LOCKED_MEMORY_BYTES:
        yield finding(
            "little_locked_memory", "this host", f"limit {locked} bytes, {host.num_rdma_devices} devices"
        )


def check_completeness(facts: Facts, expected: Expectations) -> Findings:
    for where, reason in facts.not_examined:
        yield finding("not_examined", where, reason)
    for engine in facts.engines:
        if engine.skipped and engine.reach.is_fine:
            yield finding("not_examined", engine.address, engine.skipped)
        earlier = engine.earlier
        if earlier is not None and earlier.is_answered and earlier.reused == 0:
            seen = f"0 of {earlier.prompt_tokens} tokens of the earlier prompt were cached"
            yield finding("earlier_canary_lost", engine.address, seen)


CHECKS: tuple[Callable[[Facts, Expectations], Findings], ...] = (
    check_gateway,
    check_conductor,
    check_engines,
    check_engines_together,
    check_connectors,
    check_events,
    check_store,
    check_hosts,
    check_completeness,
)


def _differ(code: str, engines: Sequence[EngineFacts], fact: Callable[[EngineFacts], str]) -> Findings:
    """One finding for each engine whose fact differs from that of most engines (in a draw: the first)."""
    values = [fact(one) for one in engines]
    if len(set(values)) < 2:
        return
    usual = max(dict.fromkeys(values), key=values.count)
    other = next(one.address for one, value in zip(engines, values, strict=True) if value == usual)
    for engine, value in zip(engines, values, strict=True):
        if value != usual:
            yield finding(code, engine.address, f"{value} here, {usual} at {other}")


def _unreached(code: str, where: str, reach: Reach, denied: str = "client_key_refused") -> DoctorFinding:
    codes = {
        Trouble.TLS: "tls_mismatch",
        Trouble.CERTIFICATE: "certificate_refused",
        Trouble.DENIED: denied,
        Trouble.NO_HTTP: "no_http_server",
    }
    return finding(codes.get(reach.trouble, code), where, reach.detail)


def _failure(shot: Shot, name: str) -> str:
    return f"the {name} canary was answered with {shot.status or 'no answer'}: {shot.error}"
