"""Everything the HTTP interface stands on, opened and closed together."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from acclimate_adapters import create
from acclimate_service.clients.admission import Admission
from acclimate_service.clients.asking import Asking
from acclimate_service.clients.clients import Clients
from acclimate_service.clients.engine import FROZEN, Batch, Engine
from acclimate_service.clients.feedback import Feedback
from acclimate_service.clients.last_images import LastImages
from acclimate_service.clients.requests import Caller, ClientRequest, Replies, Reply, rfc3339
from acclimate_service.clients.roster import Roster
from acclimate_service.clients.sessions import Sessions
from acclimate_service.clients.timelines import Timelines
from acclimate_service.clients.webhook import Webhook
from acclimate_service.compute.adapter_machine import AdapterMachine
from acclimate_service.compute.adapters import Configurations
from acclimate_service.compute.labelling import Examples, examples_of, feedback_of
from acclimate_service.compute.lineage import ModelLineage, Version, known_versions, older_in_store
from acclimate_service.compute.new_states import NewStates
from acclimate_service.compute.process import available_cores, background, pool
from acclimate_service.compute.shares import FLOW
from acclimate_service.compute.steps import StepParameters, Steps
from acclimate_service.compute.worker import Worker
from acclimate_service.federated.cohort import Rounds
from acclimate_service.federated.cohorts import Cohorts
from acclimate_service.guard.arms import Arms
from acclimate_service.guard.fleet import Fleet
from acclimate_service.guard.record import Label
from acclimate_service.metrics import Background, Metrics
from acclimate_service.models import Model, load_model, settings_by_model
from acclimate_service.replicas import Speaker, Stages
from acclimate_service.scopes import Kept, Scopes
from acclimate_service.settings import Settings, SettingsError
from acclimate_service.state import (
    Announcements,
    Census,
    ClientScope,
    EmbeddedRedis,
    Limits,
    Link,
    Listing,
    Places,
    Presence,
    Probe,
    Rates,
    StateError,
    StateStore,
    StoreFacts,
    StoreUnavailable,
    Wire,
    always,
    check,
    check_windows,
    connect,
    inspect,
    new_id,
    take_census,
)
from acclimate_service.trials.challengers import Challengers
from acclimate_store import Bundle, Catalogue
from acclimate_store.identity import identity_of

_LAST_STEP_S: Final = 1.0
"""Longest wait at the end for a step that nobody waits for any more."""
_LONGEST_CENSUS_S: Final = 1.0
"""Of walking over all keys at the start; a second is enough for a million."""
_ADAPTER: Final = re.compile(rb'"adapter":"([^"]+)"')
"""Stands at the beginning of an answer."""
_log = logging.getLogger(__name__)
RETRY_WINDOW_MS: Final = 600_000
"""Longest time within which callers are expected to retry a request."""


@dataclass(slots=True)
class Service:
    """An open service for the clients of one model; that of the default model knows the `others`, by name.

    `name` is that of the replica, different after each start. `elsewhere` are the clients that had states of other
    models when it started, by bundle; all of them if `counted`. `draining` is set once it is to end: it still answers,
    and says that it is not ready.
    """

    settings: Settings
    bundle: Bundle
    configurations: Configurations
    limits: Limits
    metrics: Metrics
    worker: Worker
    steps: Steps
    wire: Wire
    probe: Probe
    private_redis: EmbeddedRedis | None
    sessions: Sessions
    admission: Admission
    rates: Rates | None
    engine: Engine
    clients: Clients
    places: Places
    roster: Roster
    timelines: Timelines
    feedback: Feedback
    asking: Asking
    last_images: LastImages
    fleet: Fleet | None
    arms: Arms | None
    challengers: Challengers | None
    rounds: Rounds
    presence: Presence
    name: str
    elsewhere: Mapping[str, int]
    counted: bool
    others: Mapping[str, "Service"] = field(default_factory=dict)
    draining: bool = False
    started: float = field(default_factory=time.time)

    @property
    def version(self) -> str:
        """Version of the distribution."""
        return version("acclimate")

    async def predict(self, batch: Batch) -> Reply:
        """Answer a batch as `Engine.predict` does, and show it to the challengers and to the next federated round."""
        with self._waiting(batch.request.client, len(batch.images)):
            if self.rates is not None:
                await self._metered(batch.request.client.owner, len(batch.images))
            reply = await self.engine.predict(batch)
            self._count(reply, len(batch.images))
        if reply.life and self.rounds.joins(reply.configuration):
            self.rounds.note(batch.request.client)
        if reply.life and reply.replayed == "none" and self.challengers is not None:
            seen = replace(batch.request, life=reply.life)
            self.challengers.see(seen, batch.images, current=reply.configuration)
        return reply

    async def predict_frozen(self, images: NDArray[Any], parameters: StepParameters, caller: Caller) -> Reply:
        """Answer a batch for no client, as `Engine.predict_frozen` does; its images are counted as its caller's."""
        flow, seconds = FLOW.get(), self.steps.seconds(FROZEN, len(images))
        with self.admission.rows.hold(flow, len(images)), self.admission.backlog.hold(flow, seconds):
            if self.rates is not None:
                await self._metered(caller.tenant, len(images))
            reply = await self.engine.predict_frozen(images, parameters, caller)
            self._count(reply, len(images))
            return reply

    async def tell(self, request: ClientRequest, told: Sequence[Label] | Examples) -> Reply:
        """Count labels as `Feedback.tell` does, and tell them to the challengers."""
        labels = examples_of(told, request.name) if isinstance(told, Examples) else feedback_of(told)
        images = len(told.labels) if isinstance(told, Examples) else 0
        with self._waiting(request.client, images) if images else nullcontext():
            if self.rates is not None and images:
                await self._metered(request.client.owner, images)
            reply = await self.feedback.tell(request, labels)
        if reply.replayed == "none":
            self.asking.note(request.client)
        if reply.configuration and self.challengers is not None:
            self.challengers.tell(replace(request, life=reply.life), labels, current=reply.configuration)
        return reply

    async def enroll(self, request: ClientRequest, examples: Examples) -> Reply:
        """Let a client restart from labelled images, as `Clients.enroll` does."""
        with self._waiting(request.client, len(examples.labels)):
            if self.rates is not None:
                await self._metered(request.client.owner, len(examples.labels))
            return await self.clients.enroll(request, examples)

    def _count(self, reply: Reply, images: int) -> None:
        adapter = _ADAPTER.search(reply.answer)
        self.metrics.rows.labels(self.bundle.manifest.name, adapter[1].decode() if adapter else "").inc(images)

    async def _metered(self, owner: str, images: int) -> None:
        """Count images against the rate of an owner of clients.

        Raises:
            RateExceeded: they are too many for now.
            StateError: Redis failed, and `frozen` answers are off.
        """
        assert self.rates is not None
        try:
            await self.rates.take(owner, images)
        except StoreUnavailable:
            if self.settings.store_outage != "frozen":
                raise

    @contextmanager
    def _waiting(self, client: ClientScope, rows: int) -> Iterator[None]:
        """Count images of a client as under way, and what they will take of the device.

        Raises:
            Problem: `too_many_requests`.
        """
        session = self.sessions.peek(client)
        held = session.memory.held if session else None
        configuration = held.config if held else self.configurations.default
        flow, seconds = FLOW.get(), self.steps.seconds(configuration, rows)
        with self.admission.rows.hold(flow, rows), self.admission.backlog.hold(flow, seconds):
            yield

    async def obstacle(self) -> str | None:
        """Why batches cannot be answered now, or not for long; None when they can."""
        if self.draining:
            return "the replica is about to end; send batches to another one"
        longest = self.settings.request_timeout_ms / 1000
        if self.worker.busy_s > longest:
            return f"{self.settings.device} has been at one piece of work for more than {longest:g} s"
        if self.private_redis is not None and self.private_redis.failure is not None:
            return self.private_redis.failure
        return await self.probe.obstacle()

    async def about(self, stages: Stages) -> dict[str, Any]:
        """What the replica says of itself to the others."""
        every = [self, *self.others.values()]
        reason = await self.obstacle()
        journals = [each.sessions.journals() for each in every]
        return {
            "version": self.version,
            "started_at": rfc3339(self.started),
            "device": self.settings.device,
            "models": [each.bundle.manifest.key for each in every],
            "ready": reason is None,
            "reason": reason,
            "failing": list(self.metrics.background.failing),
            "waiting": self.admission.batches.taken,
            "clients_in_memory": sum(len(each.sessions) for each in every),
            "state_bytes": sum(each.sessions.nbytes for each in every),
            "leases": sum(each.sessions.leases for each in every),
            "journal_entries": sum(entries for entries, _ in journals),
            "journal_bytes": sum(nbytes for _, nbytes in journals),
            "stages": stages.look(),
        }

    async def facts(self) -> StoreFacts:
        """What its Redis says of itself now; raises StateError where it is away."""
        return await inspect(self.wire)

    def measure(self) -> None:
        """Bring the gauges up to date."""
        every = [self.sessions, *(each.sessions for each in self.others.values())]
        metrics, journals = self.metrics.state, [each.journals() for each in every]
        self.metrics.waiting.set(self.admission.batches.taken)
        metrics.sessions.set(sum(map(len, every)))
        metrics.cache_bytes.set(sum(each.nbytes for each in every))
        metrics.journal_entries.set(sum(entries for entries, _ in journals))
        metrics.journal_bytes.set(sum(nbytes for _, nbytes in journals))
        metrics.unreplicated(self.wire.unreplicated)


class _Redis(NamedTuple):
    """Where the states are kept; `private` if nobody else's."""

    private: EmbeddedRedis | None
    link: Link
    wire: Wire
    store: StateStore
    probe: Probe


class _Shared(NamedTuple):
    """What the services of all models have in common; `tenant` is that of the default model.

    `census` is of the clients that had a state at the start.
    """

    limits: Limits
    metrics: Metrics
    worker: Worker
    low_priority: Executor
    redis: _Redis
    census: Census
    admission: Admission
    rates: Rates | None
    tenant: str
    webhook: Webhook | None
    presence: Presence
    name: str


@asynccontextmanager
async def open_service(settings: Settings) -> AsyncIterator[Service]:
    """Load the models, reach Redis (or start a private one), and answer a first batch; gives that of the default model.

    Raises:
        BundleError: a model cannot be served.
        EmbeddedRedisError, StoreUnavailable, StoreUnfit: there is no Redis that could keep the states.
        SettingsError: a setting that this machine or model cannot serve, or one that contradicts another.
    """
    async with AsyncExitStack() as stack:  # closes what is opened, the last one first
        limits, metrics = _limits(settings), Metrics()
        metrics.runs(version=version("acclimate"), torch=torch.__version__, device=settings.device)
        asyncio.get_running_loop().set_default_executor(pool())
        threads = settings.threads or min(torch.get_num_threads(), available_cores())
        worker = Worker(threads, overtaking=settings.device == "cpu")
        stack.callback(_close_worker, worker)
        low_priority = stack.enter_context(background())
        models = [await load_model(each, worker) for each in settings_by_model(settings)]
        redis = await _open_redis(settings, limits, metrics, stack)
        admission = Admission(settings.max_waiting, settings.max_waiting_rows, settings.max_queue_ms / 1000)
        census = await _census(redis.wire)
        quota, tenant = settings.tenant_rows_per_minute, settings.tenant
        rates = None if quota is None else Rates(redis.wire, tenant, quota)
        webhook = None
        if settings.webhook_url is not None:
            webhook = Webhook(settings.webhook_url, settings.secret, metrics.background)
            stack.push_async_callback(webhook.aclose)
        shared = _Shared(
            limits=limits,
            metrics=metrics,
            worker=worker,
            low_priority=low_priority,
            redis=redis,
            census=census,
            admission=admission,
            rates=rates,
            tenant=tenant,
            webhook=webhook,
            presence=Presence(redis.wire, tenant),
            name=f"{settings.replica}~{new_id()}",
        )
        services = [await _open_model(each, shared, stack) for each in models]
        services[0].others = {each.bundle.manifest.name: each for each in services[1:]}
        about = partial(services[0].about, Stages(metrics))
        speaker = Speaker(shared.presence, shared.name, about, metrics.background)
        stack.push_async_callback(speaker.aclose)
        speaker.start()
        yield services[0]


async def _open_model(model: Model, shared: _Shared, stack: AsyncExitStack) -> Service:
    """Open what serves one model, beside others, and answer a first batch; raises as `open_service`."""
    settings, bundle, configurations, candidates, budget = model
    limits, metrics, worker, redis = shared.limits, shared.metrics, shared.worker, shared.redis
    wire, store = redis.wire, redis.store
    lineage = await _lineage(settings, shared, bundle, configurations)
    bundle = replace(bundle, model=bundle.model.with_hash(lineage.key))
    steps = Steps(bundle, configurations, metrics, budget, settings.influence, settings.timeline)
    machine = AdapterMachine(
        bundle,
        configurations,
        lineage,
        worker,
        budget,
        steps,
        shared.low_priority,
        exact_above=settings.inline_max,
        state_budget=settings.state_budget,
    )
    places = Places(
        wire,
        limits,
        tenant=settings.tenant,
        most=settings.max_clients,
        most_bytes=settings.tenant_bytes,
        secret=settings.secret,
    )
    scopes = Scopes(settings, limits, metrics, wire, store, machine, lineage, places)
    kept = scopes.kept(bundle.model, configurations, candidates)
    stack.push_async_callback(kept.aclose, settings.drain_budget_s)
    sessions, fleet, arms = kept.sessions, kept.fleet, kept.arms
    for heard in kept.evidence:  # so that a restart changes no answer
        await heard.hear()
    if arms is not None:
        machine.hear = arms.keep_fresh

    announcements = _announcements(redis, settings.tenant, lineage.scope, kept, metrics.background)
    announcements.start()
    stack.push_async_callback(announcements.aclose)
    cohorts = Cohorts(wire, limits, lineage.oldest_like(create("fed_ade", layers="all").needs), settings.tenant)
    rounds = Rounds(
        bundle.model,
        configurations,
        sessions,
        worker,
        cohorts,
        tenant=settings.tenant,
        background=metrics.background,
    )
    stack.push_async_callback(rounds.aclose)

    replies = Replies(store, lineage.scope, configurations)
    last_images = LastImages(sessions, replies, settings.keep_images_bytes)
    new_states = NewStates(bundle, configurations, lineage, worker, budget)
    forgetting = (rounds.forget, partial(scopes.forget, shared.tenant))
    service = Service(
        settings=settings,
        bundle=bundle,
        configurations=configurations,
        limits=limits,
        metrics=metrics,
        worker=worker,
        steps=steps,
        wire=wire,
        probe=redis.probe,
        private_redis=redis.private,
        sessions=sessions,
        admission=shared.admission,
        rates=shared.rates,
        engine=Engine(
            sessions,
            machine,
            replies,
            metrics,
            fleet=fleet,
            arms=arms,
            questions=kept.questions,
            ask_budget=settings.ask_budget,
            images=last_images,
            frozen_on_outage=settings.store_outage == "frozen",
            secret=settings.secret,
            on_harm=_on_harm(shared.webhook, bundle),
        ),
        clients=Clients(configurations, sessions, replies, new_states, fleet, kept.questions, forgetting),
        places=places,
        roster=Roster(Listing(wire, settings.tenant, lineage.scope), configurations, fleet),
        timelines=Timelines(store, lineage.scope, on=settings.timeline),
        feedback=Feedback(configurations, sessions, replies, fleet, arms, kept.evidence, budget, metrics),
        asking=Asking(sessions, replies, kept.questions),
        last_images=last_images,
        fleet=fleet,
        arms=arms,
        challengers=kept.challengers,
        rounds=rounds,
        presence=shared.presence,
        name=shared.name,
        elsewhere=lineage.elsewhere(_of_tenant(shared.census, settings.tenant)),
        counted=shared.census.complete,
    )
    # noise, since no step is taken on flat pictures
    noise = np.random.default_rng(0).integers(0, 256, (2, *bundle.manifest.input.shape), np.uint8)
    await service.engine.warm_up(noise, configurations.default)
    if settings.round_interval_s is not None:
        rounds.repeat(settings.round_interval_s, settings.round_clients)
    return service


def _on_harm(webhook: Webhook | None, bundle: Bundle) -> Callable[[ClientScope], None] | None:
    """What is to be done with a client that its labels turn to the frozen model."""
    if webhook is None:
        return None
    return partial(webhook.harmful, {"name": bundle.manifest.name, "version": bundle.manifest.version})


def _close_worker(worker: Worker) -> None:
    """Stop the thread of torch. One that does not come back is left alone: nobody waits for it any more."""
    if not worker.close(_LAST_STEP_S):
        _log.error("the device is still at one piece of work after %.0f s; it is given up", worker.busy_s)


async def _open_redis(settings: Settings, limits: Limits, metrics: Metrics, stack: AsyncExitStack) -> _Redis:
    """Reach Redis, or start a private one; raises as `open_service`."""
    url, private = settings.redis_url, None
    if url is None:
        private = await stack.enter_async_context(_private_redis(settings))
        url = private.url
    link = await connected(url)
    wire = Wire(
        link,
        resend=limits.resend,
        jitter_ms=limits.jitter_ms,
        replicas=settings.replicas_to_wait,
        observe=metrics.redis_seconds.observe,
    )
    store = StateStore(wire, limits)
    stack.push_async_callback(store.aclose)
    facts = await check(wire, override=settings.redis_override)
    probe = Probe(wire, facts, metrics.background, tenant=settings.tenant, override=settings.redis_override)
    stack.push_async_callback(probe.aclose)
    return _Redis(private, link, wire, store, probe)


def _announcements(redis: _Redis, tenant: str, model: str, kept: Kept, watched: Background) -> Announcements:
    """Forget the states of clients that other replicas delete, and hand over those that others wait for."""

    def dropped(name: str) -> None:
        owner, _, client = name.partition("/")
        if owner == tenant:
            for each in kept.everywhere:
                each.drop(client)

    def missed() -> None:
        watched.succeeded("announcements")
        redis.probe.reconnected()
        for each in kept.everywhere:
            each.check_all()

    def wanted(name: str) -> None:
        prefix = f"{model}/{tenant}/"
        if name.startswith(prefix):
            kept.sessions.hand_over(name.removeprefix(prefix))

    return Announcements(redis.link, dropped, missed, partial(watched.failed, "announcements"), wanted)


async def _lineage(settings: Settings, shared: _Shared, bundle: Bundle, configurations: Configurations) -> ModelLineage:
    """The versions that clients were served, the one of this bundle among them from now on."""
    served = identity_of(bundle.manifest, bundle.model.content_hash, bundle.model.source)
    catalogue = Catalogue(settings.model_store, settings.allowed_imports)
    known = await known_versions(shared.redis.wire, shared.tenant)
    older = await shared.worker.run(partial(older_in_store, catalogue, served, known), always)
    known = await known_versions(shared.redis.wire, shared.tenant, *older, Version(served, configurations.default))
    return ModelLineage(served, known, configurations, bundle.model)


async def _census(wire: Wire) -> Census:
    """The clients that have a state; a Redis that does not let them be counted can serve them all the same."""
    try:
        return await take_census(wire, _LONGEST_CENSUS_S)
    except StateError as error:
        _log.warning("states of other models are not counted: %s", error)
        return Census({}, complete=False)


def _of_tenant(census: Census, tenant: str) -> dict[str, int]:
    """Clients of one tenant by model scope."""
    return {scope: clients for (owner, scope), clients in census.clients.items() if owner == tenant}


def _limits(settings: Settings) -> Limits:
    """Of the state protocol; raises SettingsError where they contradict each other."""
    limits = Limits(inline_max=settings.inline_max, state_ttl_ms=settings.state_ttl_s * 1000)
    try:
        check_windows(limits, longest_request_ms=settings.request_timeout_ms, retry_window_ms=RETRY_WINDOW_MS)
    except ValueError as error:
        raise SettingsError(f"ACCLIMATE_STATE_TTL_S, ACCLIMATE_REQUEST_TIMEOUT_MS: {error}") from error
    return limits


def _private_redis(settings: Settings) -> EmbeddedRedis:
    return EmbeddedRedis(settings.data_dir, appendfsync=settings.appendfsync, max_bytes=settings.redis_max_bytes)


async def connected(url: str) -> Link:
    """A way to the Redis at this URL; raises SettingsError if it is none."""
    try:
        return await connect(url)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"ACCLIMATE_REDIS_URL: {error}") from error
