# SPDX-License-Identifier: Apache-2.0
"""What a trace shows of caches before anything is simulated: hit rates by size, and times to live.

The figures are ``sim/traces/reuse.py``'s; here they get bytes and the tiers of the hardware.
"""

from __future__ import annotations

from mooncake.cli.simulation.report import PlainTable
from mooncake.sim.serving.node_costs import NodeCosts
from mooncake.sim.traces.reuse import CurvePoint, ReuseReport

MAX_SIZES = 12
SSD_FACTORS = (1, 4, 16)
"""Sizes of an SSD tier that are shown, as multiples of the memory before it."""
CAPTION = (
    "Exact for one cache that evicts what was used longest ago; (low-high): 90 % interval over sessions like "
    "these. Several caches without a pool hit less."
)


def reuse_tables(found: ReuseReport, costs: NodeCosts, num_nodes: int = 1) -> list[PlainTable]:
    """Tables of ``found`` for nodes with ``costs``."""
    tables = [_curve(found, costs), _tiers(found, costs, num_nodes)]
    return [*tables, _ttl(found, costs)] if found.ttl else tables


def _curve(found: ReuseReport, costs: NodeCosts) -> PlainTable:
    rows: list[tuple[str, ...]] = []
    if found.recorded is not None:
        size = f"measured; as of {found.recorded.size_tokens:,}"
        rows.append((size, _bytes(found.recorded.size_tokens, costs), *_rate(found.recorded)))
    wanted = max(1.0, found.best.size_tokens)
    sizes = [wanted / 2**n for n in range(MAX_SIZES)]
    for size_tokens in sizes:
        point = found.at(size_tokens)
        if point.size_tokens < found.block_tokens:
            break
        rows.append((f"{point.size_tokens:,}", _bytes(point.size_tokens, costs), *_rate(point)))
    title = (
        f"Hit rate by size of the cache: {found.num_requests:,} requests, {found.num_sessions:,} sessions, "
        f"{found.input_tokens:,} prompt tokens"
    )
    return PlainTable(title, ("tokens", "bytes", "hit rate", "low-high"), rows, CAPTION)


def _tiers(found: ReuseReport, costs: NodeCosts, num_nodes: int) -> PlainTable:
    memory = costs.cache_tokens * num_nodes
    in_memory = found.at(memory)
    rows: list[tuple[str, ...]] = [
        (f"memory of {num_nodes} nodes", f"{memory:,}", _bytes(memory, costs), *_rate(in_memory), "")
    ]
    for factor in SSD_FACTORS:
        both = found.at(memory * (1 + factor))
        gain = f"+{both.hit_rate - in_memory.hit_rate:.1%}"
        size = memory * factor
        rows.append((f"and SSD, {factor} x memory", f"{size:,}", _bytes(size, costs), *_rate(both), gain))
    headings = ("tier", "tokens", "bytes", "hit rate", "low-high", "gain")
    return PlainTable(f"Hit rate by tier, of {costs.title}", headings, rows)


def _ttl(found: ReuseReport, costs: NodeCosts) -> PlainTable:
    rows: list[tuple[str, ...]] = [
        (
            f"{point.share:.0%}",
            _seconds(point.ttl_s),
            f"{_seconds(point.low_s)}-{_seconds(point.high_s)}",
            f"{point.resident_tokens:,}",
            _bytes(point.resident_tokens, costs),
        )
        for point in found.ttl
    ]
    advice = next((one for one in found.ttl if one.share == 0.95), found.ttl[-1])
    caption = f"Advice: a time to live of {_seconds(advice.high_s)} keeps {advice.share:.0%} of the hits."
    headings = ("part of all hits", "time to live", "low-high", "tokens kept, mean", "bytes")
    return PlainTable("Time to live after each use", headings, rows, caption)


def _rate(point: CurvePoint) -> tuple[str, str]:
    return f"{point.hit_rate:.1%}", f"{point.low:.1%}-{point.high:.1%}"


def _bytes(num_tokens: float, costs: NodeCosts) -> str:
    size = num_tokens * costs.kv_bytes_per_token
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size / 1e3:,.1f} kB"


def _seconds(seconds: float) -> str:
    for unit, factor in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
