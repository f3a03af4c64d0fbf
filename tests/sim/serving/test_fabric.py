# SPDX-License-Identifier: Apache-2.0
"""Bandwidth is shared fairly and never exceeded, and every byte arrives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.sim.kernel import Kernel
from mooncake.sim.serving.fabric import Fabric, Flow, Port


class World:
    def __init__(self, speeds: list[float], latency_s: float = 0.0) -> None:
        self.kernel = Kernel(0)
        self.fabric = Fabric(self.kernel, latency_s)
        self.ports = [Port(str(number), speed) for number, speed in enumerate(speeds)]
        self.ended: dict[int, float] = {}
        self.flows: list[Flow] = []

    def send(self, number: int, ports: list[int], size_bytes: float, at: float = 0.0) -> None:
        def begin(_: object) -> None:
            through = [self.ports[port] for port in ports]
            self.flows.append(self.fabric.start(through, size_bytes, self._ended, number))
            self.check()

        self.kernel.call_at(at, begin, None)

    def _ended(self, number: int) -> None:
        self.ended[number] = self.kernel.now
        self.check()

    def check(self) -> None:
        for port in self.ports:
            assert sum(flow.rate for flow in port.flows) <= port.bytes_per_s * (1 + 1e-9)
            for flow in port.flows:
                # Max-min: somewhere on its path a port is full, and no flow there gets more than it does.
                assert any(
                    sum(other.rate for other in one.flows) >= one.bytes_per_s * (1 - 1e-9)
                    and all(other.rate <= flow.rate * (1 + 1e-9) for other in one.flows)
                    for one in flow.ports
                )


def test_alone_a_flow_has_the_slowest_port() -> None:
    world = World([100.0, 50.0], latency_s=0.5)
    world.send(1, [0, 1], 100.0)
    world.kernel.run_all()
    assert world.ended == {1: pytest.approx(2.5)}


def test_two_share_and_the_one_left_speeds_up() -> None:
    world = World([100.0, 100.0, 100.0])
    world.send(1, [0, 1], 100.0)
    world.send(2, [0, 2], 200.0)
    world.kernel.run_all()
    assert world.ended == {1: pytest.approx(2.0), 2: pytest.approx(3.0)}


def test_what_one_cannot_use_goes_to_the_other() -> None:
    world = World([100.0, 10.0, 100.0])
    world.send(1, [0, 1], 10.0)
    world.send(2, [0, 2], 90.0)
    world.kernel.run_all()
    assert world.ended == {1: pytest.approx(1.0), 2: pytest.approx(1.0)}


def test_a_late_comer_slows_the_first() -> None:
    world = World([100.0])
    world.send(1, [0], 100.0)
    world.send(2, [0], 100.0, at=0.5)
    world.kernel.run_all()
    assert world.ended == {1: pytest.approx(1.5), 2: pytest.approx(2.0)}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 100), min_size=2, max_size=6),
    st.lists(
        st.tuples(st.sets(st.integers(0, 5), min_size=1, max_size=3), st.floats(1, 1000), st.floats(0, 20)),
        max_size=25,
    ),
)
def test_never_more_than_there_is_and_all_arrive(
    speeds: list[int], flows: list[tuple[set[int], float, float]]
) -> None:
    world = World([float(speed) for speed in speeds])
    for number, (ports, size_bytes, at) in enumerate(flows):
        world.send(number, sorted({port % len(speeds) for port in ports}), size_bytes, at)
    world.kernel.run_all()
    assert sorted(world.ended) == list(range(len(flows)))
    for port, one in enumerate(world.ports):
        assert not one.flows
        through = [number for number, flow in enumerate(flows) if port in {p % len(speeds) for p in flow[0]}]
        if through:  # a port moves no more than its speed allows between the first start and the last end
            began = min(flows[number][2] for number in through)
            moved = sum(flows[number][1] for number in through)
            assert moved <= (max(world.ended[number] for number in through) - began) * one.bytes_per_s + 1e-3
