# SPDX-License-Identifier: Apache-2.0
"""The health of a serving instance, as far as the conductor can know it.

It owns the health of an instance and refuses to know prompts, load, policies and the network: probe results
and failure reports come in as facts. ``HEALTH_MOVES`` says how health moves, and
docs/reference/state-machines.md draws it.

SUSPECT exists because one lost connection proves little: such an instance gets no work while a ready one
exists, and the next probe decides. Draining is requested by the operator and independent of health. An
instance that becomes ready ramps up (slow start), or all traffic would go to the empty new instance.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mooncake.conductor.settings import SchedulingSettings
from mooncake.state_table import StateTable, move
from mooncake.types import InstanceId, WorkerRole


class Health(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    DOWN = "down"


class ProbeOutcome(enum.StrEnum):
    READY = "ready"
    "It can serve."

    ALIVE = "alive"
    "It answers but cannot serve yet, or is shutting down."

    FAILED = "failed"
    "It did not answer."


READY, ALIVE = "ready", "alive but not ready"
REQUEST_FAILED, PROBE_FAILED, PROBES_FAILED = (
    "request failed",
    "probe failed",
    "failures_to_down probes failed",
)

HEALTH_MOVES: StateTable[Health] = StateTable(
    "health of an instance",
    Health,
    {
        **{(health, READY): move(Health.READY) for health in Health},
        **{(health, ALIVE): move(Health.STARTING) for health in Health},
        (Health.STARTING, REQUEST_FAILED): move(Health.STARTING),
        (Health.STARTING, PROBE_FAILED): move(Health.STARTING),
        (Health.STARTING, PROBES_FAILED): move(Health.STARTING),
        (Health.READY, REQUEST_FAILED): move(Health.SUSPECT),
        (Health.READY, PROBE_FAILED): move(Health.SUSPECT),
        (Health.READY, PROBES_FAILED): move(Health.DOWN),
        (Health.SUSPECT, REQUEST_FAILED): move(Health.SUSPECT),
        (Health.SUSPECT, PROBE_FAILED): move(Health.SUSPECT),
        (Health.SUSPECT, PROBES_FAILED): move(Health.DOWN),
        (Health.DOWN, REQUEST_FAILED): move(Health.DOWN),
        (Health.DOWN, PROBE_FAILED): move(Health.DOWN),
        (Health.DOWN, PROBES_FAILED): move(Health.DOWN),
    },
)

_CHOOSABLE = (Health.READY, Health.SUSPECT)


@dataclass(slots=True)
class Instance:
    """A worker: its role and its health."""

    id: InstanceId
    role: WorkerRole
    slot: int = 0
    "Its position in the columns."
    is_engine: bool = False
    "It is an engine other than this package's worker."
    push_port: int = 0
    "Port at which it answers requests for KV that it computes; 0 if there is none."
    is_silent: bool = False
    "It does not publish which blocks it has."
    health: Health = Health.STARTING
    is_watched: bool = False
    "Its KV events are followed."
    is_draining: bool = False
    detail: str = "not probed yet"
    "Why it has this health, as text."

    has_answered: bool = False
    "It has answered a probe, whatever came later; one that never answered may not exist yet."

    failed_probes: int = 0
    "Failed probes in a row."

    is_lost: bool = False
    "So many probes in a row failed, whatever its health was, that the blocks it had count as gone."

    failed_at: float = float("-inf")
    "When a request last failed there."

    probe_started_at: float | None = None
    "When the probe in flight began; None when there is none."

    next_probe_at: float | None = None
    "When the next probe is due; None while one is in flight."

    @property
    def may_be_chosen(self) -> bool:
        return self.health in _CHOOSABLE and not self.is_draining

    @property
    def is_coming(self) -> bool:
        """Whether it answers and will be ready."""
        does_answer = self.has_answered and self.failed_probes == 0
        return self.health is Health.STARTING and does_answer and not self.is_draining

    @property
    def state(self) -> str:
        """Health or drain state, as shown to operators."""
        return "draining" if self.is_draining else self.health.value

    def on_failure(self, reason: str, now: float) -> None:
        """A request failed there through the instance's fault."""
        self.failed_at = now
        self.health = HEALTH_MOVES.next(self.health, REQUEST_FAILED)
        if self.health is Health.SUSPECT:
            self.detail = reason

    def on_probe(self, outcome: ProbeOutcome, detail: str, now: float, settings: SchedulingSettings) -> None:
        """Apply a probe's result and set when the next one is due (``next_probe_at``)."""
        is_stale = self.probe_started_at is not None and self.failed_at >= self.probe_started_at
        self.probe_started_at = None
        self.has_answered = self.has_answered or outcome is not ProbeOutcome.FAILED
        if outcome is ProbeOutcome.FAILED:
            self.failed_probes += 1
            self.detail = detail
            self.is_lost = self.failed_probes >= settings.failures_to_down
            self.health = HEALTH_MOVES.next(self.health, PROBES_FAILED if self.is_lost else PROBE_FAILED)
        elif is_stale:
            pass  # sent before the failure: it proves nothing, probe again
        elif outcome is ProbeOutcome.ALIVE:
            self.failed_probes, self.is_lost = 0, False
            self.detail = detail
            self.health = HEALTH_MOVES.next(self.health, ALIVE)
        else:
            if self.health is not Health.READY:
                self.detail = detail
            self.failed_probes, self.is_lost = 0, False
            self.health = HEALTH_MOVES.next(self.health, READY)
        self.next_probe_at = now + self._probe_pause_s(settings)

    def _probe_pause_s(self, settings: SchedulingSettings) -> float:
        if self.health is Health.READY:
            return settings.probe_interval_s
        if self.health is Health.STARTING:
            return settings.suspect_probe_interval_s
        tries = max(0, self.failed_probes - settings.failures_to_down)
        return min(settings.suspect_probe_interval_s * 2.0 ** min(tries, 16), settings.max_probe_interval_s)

    def check(self) -> None:
        assert (self.probe_started_at is None) != (self.next_probe_at is None), "either waiting or in flight"
