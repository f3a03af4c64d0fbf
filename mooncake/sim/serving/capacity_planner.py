# SPDX-License-Identifier: Apache-2.0
"""The smallest cluster that meets the objectives for a trace, found by simulating candidates.

It owns the search and its criterion; it refuses to know traces, files and where prices come from: the caller
passes a function that simulates one candidate, and prices. The search: TTFT depends on the prefill pool and
TBT on the decode pool, almost independently. So each pool is first made as small as its own objective allows,
beside a pool of the other kind that is never short (doubling, then bisection); then both together are
simulated, and the pool that fails grows by one until nothing fails. From there memory, network and SSD shrink
as far as the objectives allow. The result is a local optimum, every step of which was simulated; that no
smaller split passes is shown by the sensitivity table, not proved.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from mooncake.errors import InvalidArgument
from mooncake.sim.serving.cluster import ClusterSpec
from mooncake.sim.serving.node_costs import NodeCosts
from mooncake.sim.serving.results import Summary

MAX_NODES = 4096
COLOCATED_MODES: tuple[Literal["vllm", "prefix", "chunked", "chunked_prefix"], ...] = (
    "vllm",
    "prefix",
    "chunked",
    "chunked_prefix",
)
_MIN_SHRINK = 1 / 64
"""Memory and network are not tried below this fraction of the node's."""


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dollars an hour. Everything but GPUs defaults to 0: usually it is included in their price."""

    gpu: dict[str, float]
    "Price by the name that costs files use, e.g. H100."
    spot: dict[str, float] = {}
    "The same of spot instances."
    dram_tb: float = 0.0
    ssd_tb: float = 0.0
    nic_100gbps: float = 0.0
    store_node: float = 0.0
    "A CPU node of the store, without its memory and SSD."

    def __post_init__(self) -> None:
        """Raises InvalidArgument. Prices of GPUs are checked where they are used: a file may have others."""
        for name in ("dram_tb", "ssd_tb", "nic_100gbps", "store_node"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidArgument(name, getattr(self, name), "dollars an hour, 0 or more")

    def cluster(self, spec: ClusterSpec, hardware: str, decode_hardware: str) -> float:
        """Dollars per hour of the whole cluster. Only nodes that keep a cache, or a part of the pool, pay for
        its memory and SSD."""
        costs, decode_costs = spec.node_costs, spec.decode_node_costs
        prefill = costs.num_gpus * self.of_gpu(hardware, spec.spot == "prefill") + self._nic(costs)
        decode = decode_costs.num_gpus * self.of_gpu(decode_hardware) + self._nic(decode_costs)
        # Colocated nodes keep their cache in device memory; of the rest they have a part of the pool, if any.
        caches = 0.0
        if spec.mode == "disaggregated":
            caches = spec.num_prefill * self._storage(costs, costs.cache_tokens, spec.ssd_tokens)
        pool = spec.num_pool_nodes * self._storage(costs, spec.pool_tokens, spec.store_ssd_tokens)
        stores = spec.num_store * (self.store_node + self._nic(costs))
        return spec.num_prefill * prefill + spec.num_decode * decode + caches + pool + stores

    def of_gpu(self, hardware: str, is_spot: bool = False) -> float:
        """Price of the GPU whose name ``hardware`` ends with (``llama3-70b-8xH100``)."""
        table, prices = ("spot", self.spot) if is_spot else ("gpu", self.gpu)
        for name in sorted(prices, key=len, reverse=True):
            # Behind another letter it is the end of another card's name (GB200), but for the x of "8xB200".
            if re.search(rf"(?:^|[^a-z]|\dx){re.escape(name.lower())}$", hardware.lower()):
                price = prices[name]
                if not 0 < price < math.inf:
                    raise InvalidArgument(f"{table}.{name}", price, "more than 0 dollars an hour")
                return price
        if is_spot:
            priced = ", ".join(prices) or "none"
            raise InvalidArgument("--gpu-prices", hardware, f"a name with a spot price: {priced}")
        raise InvalidArgument("--costs", hardware, f"a name that ends in a priced GPU: {', '.join(prices)}")

    def _nic(self, costs: NodeCosts) -> float:
        return costs.nic_bytes_per_s * 8 / 100e9 * self.nic_100gbps

    def _storage(self, costs: NodeCosts, num_tokens: int, num_ssd_tokens: int) -> float:
        size_tb = costs.kv_bytes_per_token / 1e12
        return num_tokens * size_tb * self.dram_tb + num_ssd_tokens * size_tb * self.ssd_tb


class Objectives(msgspec.Struct, frozen=True):
    ttft_s: float
    tbt_s: float
    attainment: float
    "The share of all requests that must be completed within both."

    def check(self) -> None:
        """Raises InvalidArgument."""
        if not 0 < self.attainment <= 1:
            raise InvalidArgument("attainment", self.attainment, "above 0, up to 1")


class CandidateCluster(msgspec.Struct, frozen=True):
    """One simulated cluster."""

    hardware: str
    mode: str
    num_prefill: int
    num_decode: int
    cache_tokens: int
    "Memory of a prefill node; ``cache_bytes`` is the same in bytes."
    cache_bytes: int
    ssd_tokens: int
    nic_bytes_per_s: float
    dollars_per_hour: float
    attainment: float
    ttft_attainment: float
    "Share of requests with their TTFT in time; ``tbt_attainment`` likewise."
    tbt_attainment: float
    meets: bool
    good_per_dollar: float
    ttft_p90_s: float
    tbt_p90_s: float
    hit_rate: float
    note: str = ""
    decode_hardware: str = ""
    "Empty: as ``hardware``."
    num_store: int = 0
    spot: str = "none"
    good_per_s: float = 0.0
    num_interruptions: int = 0

    @property
    def num_nodes(self) -> int:
        return self.num_prefill + self.num_decode + self.num_store


class CapacityPlan(msgspec.Struct, frozen=True):
    """The plan for one kind of hardware."""

    best: CandidateCluster | None
    "None: not even ``MAX_NODES`` nodes are enough."
    one_pool: CandidateCluster | None
    "The smallest cluster of colocated nodes, the best of its modes; None as above, and with unlike nodes."
    sensitivity: list[CandidateCluster]
    num_simulated: int


Simulate = Callable[[ClusterSpec, float], tuple[Summary, float, float]]
"""Summary of a candidate at a multiple of the load, and the shares of requests that met TTFT and TBT."""


class CapacityPlanner:
    """The search for one kind of hardware, or for one kind that prefills and another that decodes."""

    def __init__(
        self,
        base: ClusterSpec,
        hardware: str,
        objectives: Objectives,
        prices: Prices,
        simulate: Simulate,
        progress: Callable[[CandidateCluster], None] | None = None,
        decode_hardware: str = "",
        most_nodes: int = MAX_NODES,
    ) -> None:
        """``most_nodes``: prefill and decode nodes together at which the search ends without a result."""
        objectives.check()
        self._most_nodes = most_nodes
        self._base = base
        self._hardware = hardware
        self._decode_hardware = decode_hardware
        self._objectives = objectives
        self._prices = prices
        prices.cluster(base, hardware, decode_hardware or hardware)  # refuses what has no price now
        self._simulate = simulate
        self._progress = progress
        self._seen: dict[tuple[ClusterSpec, float], CandidateCluster] = {}
        self._num_requests = 0
        """Requests of the trace, once it was simulated."""

    def plan(self) -> CapacityPlan:
        best = self._apart()
        one_pool = self._one_pool() if self._base.decode_costs is None else None
        sensitivity = list(self._around(best)) if best is not None else []
        found = self._candidate(best) if best is not None else None
        return CapacityPlan(found, one_pool, sensitivity, len(self._seen))

    def smallest(self) -> CandidateCluster | None:
        """The best cluster of a plan, without what is around it."""
        best = self._apart()
        return self._candidate(best) if best is not None else None

    # --- disaggregated prefill and decode

    def _apart(self) -> ClusterSpec | None:
        plenty = self._plenty()
        if plenty is None:
            return None
        enough = self._objectives.attainment
        num_prefill = self._smallest(
            plenty.num_prefill, lambda n: self._with(plenty, num_prefill=n).ttft_attainment >= enough
        )
        num_decode = self._smallest(
            plenty.num_decode, lambda n: self._with(plenty, num_decode=n).tbt_attainment >= enough
        )
        spec = dataclasses.replace(plenty, num_prefill=num_prefill, num_decode=num_decode)
        while not (found := self._candidate(spec)).meets:
            # The pool whose objective is missed by more grows.
            if found.ttft_attainment <= found.tbt_attainment and spec.num_prefill < plenty.num_prefill:
                spec = dataclasses.replace(spec, num_prefill=spec.num_prefill + 1)
            elif spec.num_decode < plenty.num_decode:
                spec = dataclasses.replace(spec, num_decode=spec.num_decode + 1)
            else:
                spec = dataclasses.replace(spec, num_prefill=spec.num_prefill + 1)
        return self._shrunk(spec)

    def _plenty(self) -> ClusterSpec | None:
        """The first doubling at which everything is met; None if there is none, up to a node of each kind for
        every request: more can't help."""
        num_nodes = 1
        while 2 * num_nodes <= self._most_nodes:
            spec = dataclasses.replace(
                self._base, mode="disaggregated", num_prefill=num_nodes, num_decode=num_nodes
            )
            if self._candidate(spec).meets:
                return spec
            if num_nodes >= self._num_requests:
                break
            num_nodes *= 2
        return None

    def _smallest(self, known: int, meets: Callable[[int], bool]) -> int:
        """The least count up to ``known``, which meets the objectives, that meets them too."""
        least, most = 1, known
        while least < most:
            middle = (least + most) // 2
            if meets(middle):
                most = middle
            else:
                least = middle + 1
        return most

    def _shrunk(self, spec: ClusterSpec) -> ClusterSpec:
        """With as little SSD, memory and network as the objectives allow, each halved in turn."""
        if spec.ssd_tokens and self._with(spec, ssd_tokens=0).meets:
            spec = dataclasses.replace(spec, ssd_tokens=0)
        costs = self._base.node_costs
        tokens = costs.cache_tokens
        while (
            tokens // 2 >= max(costs.cache_tokens * _MIN_SHRINK, spec.block_tokens)
            and self._with(spec, cache_tokens=tokens // 2).meets
        ):
            tokens //= 2
            spec = dataclasses.replace(spec, cache_tokens=tokens)
        speed = costs.nic_bytes_per_s
        while (
            speed / 2 >= costs.nic_bytes_per_s * _MIN_SHRINK
            and self._with(spec, nic_bytes_per_s=speed / 2).meets
        ):
            speed /= 2
            spec = dataclasses.replace(spec, nic_bytes_per_s=speed)
        return spec

    # --- colocated nodes

    def _one_pool(self) -> CandidateCluster | None:
        found: list[CandidateCluster] = []
        for mode in COLOCATED_MODES:
            base = dataclasses.replace(
                self._base,
                mode=mode,
                num_decode=0,
                pipeline_nodes=1,
                cache_tokens=None,
                ssd_tokens=0,
                num_store=0,
                store_tokens=None,
                store_ssd_tokens=0,
                spot="none",
            )
            most = 1
            while most <= self._most_nodes and not self._with(base, num_prefill=most).meets:
                if most >= self._num_requests:
                    break
                most *= 2
                if found and most > 2 * min(one.num_nodes for one in found):
                    break  # another mode is smaller anyway
            else:
                if most > self._most_nodes:
                    continue
                meets = self._meets_with(base)
                found.append(self._with(base, num_prefill=self._smallest(most, meets)))
        return min(
            found, key=lambda one: (one.dollars_per_hour, one.num_nodes, -one.attainment), default=None
        )

    def _meets_with(self, base: ClusterSpec) -> Callable[[int], bool]:
        return lambda num_nodes: self._with(base, num_prefill=num_nodes).meets

    # --- sensitivity

    def _around(self, best: ClusterSpec) -> Iterable[CandidateCluster]:
        """What one step in each direction changes."""
        costs = best.node_costs
        steps: list[tuple[str, dict[str, object], float]] = [
            ("25 % more load", {}, 1.25),
            ("50 % more load", {}, 1.5),
            ("one prefill node more", {"num_prefill": best.num_prefill + 1}, 1.0),
            ("one decode node more", {"num_decode": best.num_decode + 1}, 1.0),
            ("twice the memory", {"cache_tokens": costs.cache_tokens * 2}, 1.0),
            ("twice the network", {"nic_bytes_per_s": costs.nic_bytes_per_s * 2}, 1.0),
            ("half the network", {"nic_bytes_per_s": costs.nic_bytes_per_s / 2}, 1.0),
        ]
        if costs.cache_tokens // 2 >= best.block_tokens:
            steps.insert(4, ("half the memory", {"cache_tokens": costs.cache_tokens // 2}, 1.0))
        if best.num_prefill > 1:
            steps.insert(2, ("one prefill node less", {"num_prefill": best.num_prefill - 1}, 1.0))
        if best.num_decode > 1:
            steps.insert(3, ("one decode node less", {"num_decode": best.num_decode - 1}, 1.0))
        for note, changes, load in steps:
            spec = dataclasses.replace(best, **changes)  # type: ignore[arg-type]
            yield msgspec.structs.replace(self._candidate(spec, load), note=note)

    # --- one candidate

    def _with(self, spec: ClusterSpec, **changes: float) -> CandidateCluster:
        return self._candidate(dataclasses.replace(spec, **changes))  # type: ignore[arg-type]

    def _candidate(self, spec: ClusterSpec, load: float = 1.0) -> CandidateCluster:
        known = self._seen.get((spec, load))
        if known is not None:
            return known
        summary, ttft_share, tbt_share = self._simulate(spec, load)
        self._num_requests = summary.num_requests
        attainment = summary.num_good / max(1, summary.num_requests)
        costs = spec.node_costs
        dollars = self._prices.cluster(spec, self._hardware, self._decode_hardware or self._hardware)
        found = CandidateCluster(
            hardware=self._hardware,
            mode=spec.mode,
            num_prefill=spec.num_prefill,
            num_decode=spec.num_decode,
            cache_tokens=costs.cache_tokens,
            cache_bytes=costs.cache_tokens * costs.kv_bytes_per_token,
            ssd_tokens=spec.ssd_tokens,
            nic_bytes_per_s=costs.nic_bytes_per_s,
            dollars_per_hour=dollars,
            attainment=attainment,
            ttft_attainment=ttft_share,
            tbt_attainment=tbt_share,
            meets=attainment >= self._objectives.attainment,
            good_per_dollar=summary.goodput_per_s * 3600 / dollars if dollars else 0.0,
            ttft_p90_s=summary.ttft_s.p90,
            tbt_p90_s=summary.tbt_s.p90,
            hit_rate=summary.hit_rate,
            decode_hardware=self._decode_hardware,
            num_store=spec.num_store,
            spot=spec.spot,
            good_per_s=summary.goodput_per_s,
            num_interruptions=summary.num_interruptions,
        )
        self._seen[spec, load] = found
        if self._progress is not None:
            self._progress(found)
        return found
