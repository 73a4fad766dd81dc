"""Everything the HTTP interface stands on, opened and closed together."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from acclimate_adapters import FrozenModel
from acclimate_service.adapter_machine import Adapted, AdapterMachine
from acclimate_service.choices import candidates_of, configurations_of, connected, limits_of, load_bundle
from acclimate_service.clients import Clients
from acclimate_service.cohort import Rounds
from acclimate_service.configuration import Configurations, canonical
from acclimate_service.cores import available_cores
from acclimate_service.device_cache import DeviceCache
from acclimate_service.embedded import EmbeddedRedis
from acclimate_service.engine import Engine
from acclimate_service.feedback import Feedback
from acclimate_service.guard.fleet import Fleet
from acclimate_service.replies import Replies
from acclimate_service.sessions import Sessions
from acclimate_service.settings import Settings, SettingsError
from acclimate_service.shadows import Candidate, Guard, Shadows, scope_of
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
    check,
    new_id,
)
from acclimate_service.state.cohorts import Cohorts
from acclimate_service.state.pools import Pools
from acclimate_service.state_metrics import StateMetrics
from acclimate_service.switching import Beginnings, Duels
from acclimate_service.telemetry import Telemetry
from acclimate_service.worker import Worker, always
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


@asynccontextmanager
async def open_service(settings: Settings) -> AsyncIterator[Service]:
    """Load the model, reach Redis (or start a private one), and answer a first batch.

    Raises:
        BundleError: the model cannot be served.
        EmbeddedRedisError, StoreUnavailable, StoreUnfit: there is no Redis that could keep the states.
        SettingsError: a setting that this machine or model cannot serve, or one that contradicts another.
    """
    limits = limits_of(settings)
    telemetry = Telemetry()
    async with AsyncExitStack() as stack:
        worker = Worker(settings.threads or min(torch.get_num_threads(), available_cores()))
        stack.callback(worker.close)
        bundle = await worker.run(lambda: load_bundle(settings), always)
        configurations = configurations_of(settings, bundle.model)
        model = bundle.model.content_hash
        url = settings.redis_url or (await stack.enter_async_context(_private_redis(settings))).url
        link = await connected(url)
        wire = Wire(link, resend=limits.resend, jitter_ms=limits.jitter_ms, replicas=settings.replicas_to_wait)
        store = StateStore(wire, limits)
        stack.push_async_callback(store.aclose)
        facts = await check(wire, override=settings.redis_override)
        machine = _machine(settings, bundle, configurations, worker, telemetry)
        keep = partial(_keep, settings, store, limits, machine)
        beginnings = _beginnings(settings, wire, limits, model, configurations.default, telemetry)
        stack.push_async_callback(beginnings.evidence.aclose)
        sessions = keep(model, beginnings.configuration, settings.cache_bytes, telemetry.state)
        stack.push_async_callback(sessions.aclose, settings.drain_budget_s)
        guard = _guard(settings, wire, limits, bundle.model, keep, sessions, beginnings)
        if guard is not None:
            stack.push_async_callback(guard.fleet.aclose)
            stack.push_async_callback(guard.shadows.aclose, settings.drain_budget_s)
        announcements = _listen(link, sessions, guard, settings.tenant, model)
        stack.push_async_callback(announcements.aclose)
        cohorts = Cohorts(wire, limits, model, settings.tenant)
        rounds = Rounds(bundle.model, configurations, sessions, worker, cohorts, tenant=settings.tenant)
        stack.push_async_callback(rounds.aclose)
        replies = Replies(store, model, configurations)
        engine = Engine(
            *(sessions, machine, replies, telemetry),
            max_waiting=settings.max_waiting,
            max_waiting_rows=settings.max_waiting_rows,
            outage=settings.store_outage,
            guard=guard,
            note=rounds.note,
        )
        clients = Clients(bundle, configurations, store, sessions, replies, worker, guard)
        feedback = Feedback(configurations, sessions, replies, guard, telemetry)
        await engine.warm_up(np.zeros((2, *bundle.manifest.input.shape), np.uint8), configurations.default)
        if settings.round_interval_s is not None:
            rounds.repeat(settings.round_interval_s, settings.round_clients)
        yield Service(
            *(settings, bundle, configurations, limits, sessions, engine, clients, feedback, rounds),
            *(telemetry, facts, wire),
        )


def _machine(
    settings: Settings, bundle: Bundle, configurations: Configurations, worker: Worker, telemetry: Telemetry
) -> AdapterMachine:
    return AdapterMachine(
        *(bundle, configurations, worker, telemetry),
        exact_above=settings.inline_max,
        state_budget=settings.state_budget,
    )


def _private_redis(settings: Settings) -> EmbeddedRedis:
    return EmbeddedRedis(settings.data_dir, appendfsync=settings.appendfsync)


def _keep(
    settings: Settings,
    store: StateStore,
    limits: Limits,
    machine: AdapterMachine,
    scope: str,
    configuration: Callable[[], str],
    budget: int,
    metrics: StateMetrics,
) -> Sessions:
    """The sessions of all clients in one scope, where they begin with what is the configuration then."""

    def begin(client: ClientScope) -> Session[Adapted]:
        policy = Policy(configuration(), journal=settings.journal, strict_engine=settings.strict_replay)
        nonce = f"{settings.replica}~{new_id()}"
        return Session(Context(store, limits, client, scope, machine, policy, observer=metrics, nonce=nonce))

    device_cache = None if settings.device == "cpu" else DeviceCache(settings.device_cache_bytes)
    return Sessions(begin, budget, metrics, device_cache)


def _guard(
    settings: Settings,
    wire: Wire,
    limits: Limits,
    model: FrozenModel,
    keep: Callable[..., Sessions],
    sessions: Sessions,
    beginnings: Beginnings,
) -> Guard | None:
    if settings.auto_switch and (settings.guard == "off" or not settings.candidates):
        raise SettingsError("ACCLIMATE_AUTO_SWITCH: it needs ACCLIMATE_CANDIDATES, and a guard that is not off")
    if settings.guard == "off":
        return None
    pools = Pools(wire, limits, model.content_hash, settings.tenant, settings.secret)
    fleet = Fleet(pools, settings.guard, settings.guard_alpha)
    budget, unseen = settings.cache_bytes // 4, StateMetrics(CollectorRegistry())

    def beside(what: str, configuration: str) -> Sessions:
        return keep(scope_of(model.content_hash, what), lambda: configuration, budget, unseen)

    names, duels = candidates_of(settings, model), None
    if settings.auto_switch:
        pairs = {name: beside(f"{beginnings.default} {name}", canonical("none", {})) for name in names}
        duels = Duels(beginnings, pairs, sessions, fleet)
    shadows = Shadows([Candidate(name, beside(name, name)) for name in names], settings.candidate_share, fleet, duels)
    return Guard(fleet, shadows, duels)


def _beginnings(
    settings: Settings, wire: Wire, limits: Limits, model: str, default: str, telemetry: Telemetry
) -> Beginnings:
    """What new clients begin with; always the default where nobody switches."""
    pools = Pools(wire, limits, scope_of(model, default), settings.tenant, settings.secret)
    alpha = settings.guard_alpha / max(1, len(settings.candidates))
    return Beginnings(default, Fleet(pools, "adapt", alpha), telemetry, switches=settings.auto_switch)


def _listen(link: Link, sessions: Sessions, guard: Guard | None, tenant: str, model: str) -> Announcements:
    """Forget the states of clients that other replicas delete, and hand over those that others wait for."""
    keepers = (sessions,) if guard is None else (sessions, guard.shadows)

    def dropped(name: str) -> None:
        owner, _, client = name.partition("/")
        if owner == tenant:
            for keeper in keepers:
                keeper.drop(client)

    def missed() -> None:
        for keeper in keepers:
            keeper.drop_all()

    def wanted(name: str) -> None:
        scope, owner, client = name.split("/", 2)
        if (scope, owner) == (model, tenant):
            sessions.hand_over(client)

    announcements = Announcements(link, dropped, missed, wanted)
    announcements.start()
    return announcements
