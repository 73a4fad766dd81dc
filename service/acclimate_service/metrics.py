"""Metrics for Prometheus; no client id is ever a label."""

import logging
import platform
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Literal, TypeAlias

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_REPLAY_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
_REDIS_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_TIERS = {"warm": "memory", "cold": "none", "reset": "none"}
_log = logging.getLogger(__name__)
disable_created_metrics()  # type: ignore[no-untyped-call]  # a gauge beside every counter, which says what `process_start_time_seconds` does
PHASES: Final = ("parse", "decode", "queue", "compute", "store")
"""On what a request spends its time: until it is read, of which decoding its body is a part, waiting for its turn, in
the thread of torch, and waiting for Redis. Some of it may be at the same time."""
Spell: TypeAlias = tuple[str, float, float]
"""One of `PHASES`, its begin and its end (`time.monotonic()`)."""
MOST_SPELLS: Final = 512
"""Of a request that are remembered, the newest: what it began may go on for long after it."""
SPELLS: ContextVar[deque[Spell] | None] = ContextVar("spells", default=None)
"""What the present request was at so far; None where there is none."""


def seconds_of(spells: Iterable[Spell]) -> dict[str, float]:
    """How long each phase went on; what happened at the same time counts once."""
    seconds, until = dict[str, float](), dict[str, float]()
    for phase, began, ended in sorted(spells, key=itemgetter(1)):
        since = max(began, until.get(phase, began))
        seconds[phase] = seconds.get(phase, 0.0) + max(0.0, ended - since)
        until[phase] = max(ended, since)
    return seconds


class Metrics:
    """The service's own registry: two apps in one process do not share numbers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        on = self.registry
        ProcessCollector(registry=on)
        self._build = Info("acclimate_build", "What is running.", registry=on)
        self.requests = Counter(
            "acclimate_requests",
            "Requests by method, route, model and status.",
            ["method", "route", "model", "status"],
            registry=on,
        )
        self.request_seconds = Histogram(
            "acclimate_request_duration_seconds",
            "Duration of requests by method, route and model.",
            ["method", "route", "model"],
            buckets=_SECONDS,
            registry=on,
        )
        self.phases = Histogram(
            "acclimate_phase_seconds",
            "What requests spent their time on; decoding is a part of parsing.",
            ["phase"],
            buckets=_SECONDS,
            registry=on,
        )
        self.phase_seconds = {phase: self.phases.labels(phase) for phase in PHASES}
        self.redis_seconds = Histogram(
            "acclimate_redis_seconds", "Duration of exchanges with Redis.", buckets=_REDIS_SECONDS, registry=on
        )
        self.step_seconds = Histogram(
            "acclimate_step_seconds",
            "Duration of adapter steps; those taken together are one.",
            ["model", "adapter"],
            buckets=_SECONDS,
            registry=on,
        )
        self.step_batches = Histogram(
            "acclimate_step_batches", "Batches that were answered together.", buckets=_SIZES, registry=on
        )
        self.step_rows = Histogram(
            "acclimate_step_rows", "Images that were answered together.", buckets=_SIZES, registry=on
        )
        self.rows = Counter("acclimate_rows", "Images answered.", ["model", "adapter"], registry=on)
        self.version_rows = Counter(
            "acclimate_version_rows", "Images of clients by version.", ["model", "version", "result"], registry=on
        )
        self.shadow_rows = Counter(
            "acclimate_shadow_rows",
            "Images for a version in the shadow: agreed or differed with what was answered, failed or left out.",
            ["model", "version", "result"],
            registry=on,
        )
        self.version_share = Gauge(
            "acclimate_version_share",
            "Share of clients that a loaded version answers.",
            ["model", "version"],
            registry=on,
        )
        self.skipped_rows = Counter(
            "acclimate_skipped_rows", "Images that tell nothing: answered, not folded into a state.", registry=on
        )
        self.fallbacks = Counter(
            "acclimate_fallbacks", "Steps that the guard rails answered unadapted.", ["model", "adapter"], registry=on
        )
        self.waiting = Gauge("acclimate_waiting", "Batches in the queue or at work.", registry=on)
        self.labels = Counter("acclimate_labels", "Labels told, by what became of them.", ["result"], registry=on)
        self.guarded = Counter("acclimate_guarded_answers", "Answers of the frozen model.", ["because"], registry=on)
        self.switches = Counter(
            "acclimate_guard_switches", "Changes of a client's answers.", ["to", "because"], registry=on
        )
        self.state = StateMetrics(on)
        self.background = Background(on)
        self.ready = Gauge("acclimate_ready", "1 when the service answers batches.", registry=on)

    def runs(self, **versions: str) -> None:
        """Say what is running: versions of the service and what it stands on."""
        self._build.info({**versions, "python": platform.python_version()})

    def render(self, accepted: str) -> tuple[bytes, str]:
        """All metrics, and their media type: OpenMetrics or Prometheus' text, as an Accept header has it."""
        encode, media_type = choose_encoder(accepted)
        return encode(self.registry), media_type


@dataclass(frozen=True, slots=True)
class Failing:
    """Work that nobody waits for, and that fails: since when (monotonic seconds), and why it did last."""

    since: float
    error: Exception


class Background:
    """Watches over work that nobody waits for: its failures are logged with their cause, counted, and shown.

    Attributes:
        failing: the work whose last run failed, by its name.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the metrics."""
        self.failing: dict[str, Failing] = {}
        self._failures = Counter(
            "acclimate_background_failures", "Failures of work that nobody waits for.", ["task"], registry=registry
        )
        self._failing = Gauge(
            "acclimate_background_failing", "1 while the last run of such work failed.", ["task"], registry=registry
        )

    async def run(self, task: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do one round of work that is done again and again.

        Args:
            task: what it is, as the metrics name it.
            work: begins it.
        """
        try:
            await work()
        except Exception as error:
            self.failed(task, error)
        else:
            self.succeeded(task)

    def failed(self, task: str, error: Exception) -> None:
        """Work failed; the first of a row of failures is logged with its traceback."""
        first = task not in self.failing
        self.failing[task] = Failing(time.monotonic() if first else self.failing[task].since, error)
        self._failures.labels(task).inc()
        self._failing.labels(task).set(1)
        _log.warning("%s failed in the background: %r", task, error, exc_info=error if first else None)

    def succeeded(self, task: str) -> None:
        """Work was done."""
        if self.failing.pop(task, None):
            self._failing.labels(task).set(0)


class StateMetrics:
    """An observer of the state protocol, and what else there is to count of states."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the metrics."""
        on = registry
        self._writes = Counter("acclimate_state_commits", "Writes of client state.", ["way", "result"], registry=on)
        self._loads = Counter(
            "acclimate_state_loads", "Where a request found its client's state.", ["tier"], registry=on
        )
        self._opens = Counter("acclimate_state_opens", "Journals opened for writing.", ["lease"], registry=on)
        self._replayed = Counter("acclimate_state_replayed_batches", "Journal entries computed again.", registry=on)
        self._replay_seconds = Histogram(
            "acclimate_state_replay_seconds", "Duration of replays.", buckets=_REPLAY_SECONDS, registry=on
        )
        self._engine_changes = Counter(
            "acclimate_state_replay_engine_changes", "Entries computed again by another engine.", registry=on
        )
        self._snapshots = Counter("acclimate_state_snapshots", "Background snapshots.", ["result"], registry=on)
        self._snapshot_bytes = Counter("acclimate_state_snapshot_bytes", "Bytes of snapshots.", registry=on)
        self.answers = Counter("acclimate_state_answers", "Where answers came from.", ["replayed"], registry=on)
        self._unreplicated = Counter(
            "acclimate_state_unreplicated", "Writes that too few copies of Redis confirmed in time.", registry=on
        )
        self._told = 0
        self.sessions = Gauge("acclimate_state_sessions", "Clients whose state is in memory.", registry=on)
        self.cache_bytes = Gauge("acclimate_state_cache_bytes", "Bytes of client state in memory.", registry=on)
        self.journal_entries = Gauge(
            "acclimate_state_journal_entries", "Journal entries of the clients in memory.", registry=on
        )
        self.journal_bytes = Gauge(
            "acclimate_state_journal_bytes", "Bytes of the journals of the clients in memory.", registry=on
        )

    def unreplicated(self, writes: int) -> None:
        """So many writes were not confirmed in time since the start."""
        self._unreplicated.inc(writes - self._told)
        self._told = writes

    def found(self, status: str) -> None:
        """A request found its client's state."""
        self._loads.labels(_TIERS.get(status, "redis")).inc()

    def wrote(self, way: Literal["full", "delta"], result: str) -> None:
        """Redis answered a write."""
        self._writes.labels(way, result).inc()

    def opened(self, stolen: bool) -> None:
        """A journal was opened."""
        self._opens.labels("stolen" if stolen else "free").inc()

    def replayed(self, entries: int, seconds: float) -> None:
        """A journal was computed again."""
        self._replayed.inc(entries)
        self._replay_seconds.observe(seconds)

    def snapshot(self, taken: bool, nbytes: int) -> None:
        """A snapshot was taken, or not."""
        self._snapshots.labels("taken" if taken else "failed").inc()
        self._snapshot_bytes.inc(nbytes)

    def engine_changed(self) -> None:
        """An entry was computed again by another engine than before."""
        self._engine_changes.inc()
