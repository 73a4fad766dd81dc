"""Everything the HTTP interface stands on, opened and closed together."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from acclimate_service.choices import candidates_of, configurations_of, connected, limits_of, load_bundle
from acclimate_service.clients.clients import Clients
from acclimate_service.clients.engine import Engine
from acclimate_service.clients.feedback import Feedback
from acclimate_service.clients.replies import Replies
from acclimate_service.clients.sessions import Sessions
from acclimate_service.compute.adapted import Adapted
from acclimate_service.compute.adapter_machine import AdapterMachine
from acclimate_service.compute.configuration import Configurations, canonical
from acclimate_service.compute.cores import available_cores
from acclimate_service.compute.device_cache import DeviceCache
from acclimate_service.compute.threads import background, pool
from acclimate_service.compute.worker import Worker
from acclimate_service.federated.cohort import Rounds
from acclimate_service.federated.cohorts import Cohorts
from acclimate_service.guard.fleet import Fleet
from acclimate_service.guard.pools import Pools
from acclimate_service.metrics import Telemetry
from acclimate_service.settings import Settings, SettingsError
from acclimate_service.state import (
    Announcements,
    ClientScope,
    Context,
    Limits,
    Link,
    Policy,
    Session,
    StateError,
    StateStore,
    StoreFacts,
    Wire,
    always,
    check,
    new_id,
)
from acclimate_service.state.redis.embedded import EmbeddedRedis
from acclimate_service.state_metrics import StateMetrics
from acclimate_service.trials.shadows import Candidate, Guard, Shadows, scope_of
from acclimate_service.trials.switching import Beginnings, Duels
from acclimate_store import Bundle

PROBE_S = 1.0
"""Longest wait of the readiness probe for Redis; orchestrators give probes little more."""


@dataclass(slots=True)
class Service:
    """An open service. `draining` is set once it is to end: it still answers, and says that it is not ready."""

    settings: Settings
    bundle: Bundle
    configurations: Configurations
    limits: Limits
    sessions: Sessions
    engine: Engine
    clients: Clients
    feedback: Feedback
    rounds: Rounds
    worker: Worker
    telemetry: Telemetry
    store_facts: StoreFacts
    wire: Wire
    draining: bool = False

    @property
    def version(self) -> str:
        """Version of the distribution."""
        return version("acclimate")

    async def obstacle(self) -> str | None:
        """Why batches cannot be answered now, or not for long; None when they can."""
        if self.draining:
            return "the replica is about to end; send batches to another one"
        try:
            async with asyncio.timeout(PROBE_S):
                await self.wire.read("PING")
        except StateError as error:
            return str(error)
        except TimeoutError:
            return f"Redis does not answer within {PROBE_S:g} s"
        return None

    def measure(self) -> None:
        """Bring the gauges up to date."""
        metrics, (entries, nbytes) = self.telemetry.state, self.sessions.journals()
        metrics.journal_entries.set(entries)
        metrics.journal_bytes.set(nbytes)
        metrics.unreplicated.set(self.wire.unreplicated)


@dataclass(frozen=True, slots=True)
class _Ground:
    """What all parts of a service stand on; `stack` closes them, the last one first."""

    stack: AsyncExitStack
    settings: Settings
    limits: Limits
    telemetry: Telemetry
    worker: Worker
    background: Executor
    bundle: Bundle
    configurations: Configurations
    link: Link
    wire: Wire
    store: StateStore
    facts: StoreFacts

    @property
    def model(self) -> str:
        return self.bundle.model.content_hash

    def pools(self, scope: str) -> Pools:
        return Pools(self.wire, self.limits, scope, self.settings.tenant, self.settings.secret)

    async def knows(self, client: ClientScope) -> bool:
        """Whether there is such a client."""
        return await self.store.describe(client, self.model) is not None


@asynccontextmanager
async def open_service(settings: Settings) -> AsyncIterator[Service]:
    """Load the model, reach Redis (or start a private one), and answer a first batch.

    Raises:
        BundleError: the model cannot be served.
        EmbeddedRedisError, StoreUnavailable, StoreUnfit: there is no Redis that could keep the states.
        SettingsError: a setting that this machine or model cannot serve, or one that contradicts another.
    """
    async with AsyncExitStack() as stack:
        ground = await _ground(stack, settings)
        machine = _machine(ground)
        keep, beginnings = partial(_keep, ground, machine), _beginnings(ground)
        sessions = keep(ground.model, beginnings.configuration, settings.cache_bytes, ground.telemetry.state)
        stack.push_async_callback(sessions.aclose, settings.drain_budget_s)
        guard = _guard(ground, machine, keep, sessions, beginnings)
        _listen(ground, sessions, guard)
        rounds = _rounds(ground, sessions)
        replies = Replies(ground.store, ground.model, ground.configurations)
        engine = Engine(
            *(sessions, machine, replies, ground.telemetry),
            max_waiting=settings.max_waiting,
            max_waiting_rows=settings.max_waiting_rows,
            outage=settings.store_outage,
            guard=guard,
            note=rounds.note,
        )
        administered = (ground.store, sessions, replies, ground.worker, guard)
        clients = Clients(ground.bundle, ground.configurations, *administered)
        feedback = Feedback(ground.configurations, sessions, replies, guard, ground.telemetry)
        images = np.zeros((2, *ground.bundle.manifest.input.shape), np.uint8)
        await engine.warm_up(images, ground.configurations.default)
        if settings.round_interval_s is not None:
            rounds.repeat(settings.round_interval_s, settings.round_clients)
        yield Service(
            *(settings, ground.bundle, ground.configurations, ground.limits, sessions, engine, clients, feedback),
            *(rounds, ground.worker, ground.telemetry, ground.facts, ground.wire),
        )


async def _ground(stack: AsyncExitStack, settings: Settings) -> _Ground:
    limits = limits_of(settings)
    asyncio.get_running_loop().set_default_executor(pool())
    worker = Worker(settings.threads or min(torch.get_num_threads(), available_cores()))
    stack.callback(worker.close)
    yielding = stack.enter_context(background())
    bundle = await worker.run(lambda: load_bundle(settings), always)
    configurations = configurations_of(settings, bundle.model)
    url = settings.redis_url or (await stack.enter_async_context(_private_redis(settings))).url
    link = await connected(url)
    wire = Wire(link, resend=limits.resend, jitter_ms=limits.jitter_ms, replicas=settings.replicas_to_wait)
    store = StateStore(wire, limits)
    stack.push_async_callback(store.aclose)
    facts = await check(wire, override=settings.redis_override)
    running = (Telemetry(), worker, yielding)
    return _Ground(stack, settings, limits, *running, bundle, configurations, link, wire, store, facts)


def _private_redis(settings: Settings) -> EmbeddedRedis:
    return EmbeddedRedis(settings.data_dir, appendfsync=settings.appendfsync, max_bytes=settings.redis_max_bytes)


def _machine(ground: _Ground) -> AdapterMachine:
    return AdapterMachine(
        *(ground.bundle, ground.configurations, ground.worker, ground.telemetry, ground.background),
        exact_above=ground.settings.inline_max,
        state_budget=ground.settings.state_budget,
    )


def _keep(
    ground: _Ground,
    machine: AdapterMachine,
    scope: str,
    configuration: Callable[[], str],
    budget: int,
    metrics: StateMetrics,
) -> Sessions:
    """The sessions of all clients in one scope, where they begin with what is the configuration then."""
    settings = ground.settings

    def begin(client: ClientScope) -> Session[Adapted]:
        policy = Policy(configuration(), journal=settings.journal, strict_engine=settings.strict_replay)
        nonce = f"{settings.replica}~{new_id()}"
        kept = (ground.store, ground.limits, client, scope, machine, policy)
        return Session(Context(*kept, observer=metrics, nonce=nonce))

    device_cache = None if settings.device == "cpu" else DeviceCache(settings.device_cache_bytes)
    return Sessions(begin, budget, metrics, device_cache)


def _beginnings(ground: _Ground) -> Beginnings:
    """What new clients begin with; always the default where nobody switches."""
    settings, default = ground.settings, ground.configurations.default
    alpha = settings.guard_alpha / max(1, len(settings.candidates))
    evidence = Fleet(ground.pools(scope_of(ground.model, default)), ground.knows, "adapt", alpha)
    ground.stack.push_async_callback(evidence.aclose)
    return Beginnings(default, evidence, ground.telemetry, switches=settings.auto_switch)


def _guard(
    ground: _Ground,
    machine: AdapterMachine,
    keep: Callable[..., Sessions],
    sessions: Sessions,
    beginnings: Beginnings,
) -> Guard | None:
    settings, model = ground.settings, ground.model
    if settings.auto_switch and (settings.guard == "off" or not settings.candidates):
        raise SettingsError("ACCLIMATE_AUTO_SWITCH: it needs ACCLIMATE_CANDIDATES, and a guard that is not off")
    if settings.guard == "off":
        return None
    fleet = Fleet(ground.pools(model), ground.knows, settings.guard, settings.guard_alpha)
    ground.stack.push_async_callback(fleet.aclose)
    budget, unseen = settings.cache_bytes // 4, StateMetrics(CollectorRegistry())

    def beside(what: str, configuration: str) -> Sessions:
        return keep(scope_of(model, what), lambda: configuration, budget, unseen)

    names, duels = candidates_of(settings, ground.bundle.model), None
    if settings.auto_switch:
        pairs = {name: beside(f"{beginnings.default} {name}", canonical("none", {})) for name in names}
        duels = Duels(beginnings, pairs, sessions, fleet, machine.initial)
    shadows = Shadows([Candidate(name, beside(name, name)) for name in names], settings.candidate_share, fleet, duels)
    ground.stack.push_async_callback(shadows.aclose, settings.drain_budget_s)
    return Guard(fleet, shadows, duels)


def _rounds(ground: _Ground, sessions: Sessions) -> Rounds:
    tenant = ground.settings.tenant
    cohorts = Cohorts(ground.wire, ground.limits, ground.model, tenant)
    rounds = Rounds(ground.bundle.model, ground.configurations, sessions, ground.worker, cohorts, tenant=tenant)
    ground.stack.push_async_callback(rounds.aclose)
    return rounds


def _listen(ground: _Ground, sessions: Sessions, guard: Guard | None) -> None:
    """Forget the states of clients that other replicas delete, and hand over those that others wait for."""
    keepers = (sessions,) if guard is None else (sessions, guard.shadows)
    tenant, model = ground.settings.tenant, ground.model

    def dropped(name: str) -> None:
        owner, _, client = name.partition("/")
        if owner == tenant:
            for keeper in keepers:
                keeper.drop(client)

    def missed() -> None:
        for keeper in keepers:
            keeper.drop_all()

    def wanted(name: str) -> None:
        prefix = f"{model}/{tenant}/"
        if name.startswith(prefix):
            sessions.hand_over(name.removeprefix(prefix))

    announcements = Announcements(ground.link, dropped, missed, wanted)
    announcements.start()
    ground.stack.push_async_callback(announcements.aclose)
