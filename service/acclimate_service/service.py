"""What answers the clients of one version of a model, opened and closed together."""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter

from acclimate_adapters import create
from acclimate_service.clients.admission import Admission
from acclimate_service.clients.asking import Asking
from acclimate_service.clients.clients import Clients
from acclimate_service.clients.engine import FROZEN, Batch, Engine
from acclimate_service.clients.feedback import Feedback
from acclimate_service.clients.last_images import LastImages
from acclimate_service.clients.requests import Caller, ClientRequest, Replies, Reply
from acclimate_service.clients.roster import Roster
from acclimate_service.clients.sessions import Sessions
from acclimate_service.clients.timelines import Timelines
from acclimate_service.clients.webhook import Webhook
from acclimate_service.compute.adapter_machine import AdapterMachine
from acclimate_service.compute.adapters import Configurations
from acclimate_service.compute.labelling import Examples, examples_of, feedback_of
from acclimate_service.compute.lineage import ModelLineage, Version, known_versions, older_in_store
from acclimate_service.compute.new_states import NewStates
from acclimate_service.compute.shares import FLOW
from acclimate_service.compute.steps import StepParameters, Steps
from acclimate_service.compute.worker import Worker
from acclimate_service.federated.cohort import Rounds
from acclimate_service.federated.cohorts import Cohorts
from acclimate_service.guard.arms import Arms
from acclimate_service.guard.fleet import Fleet
from acclimate_service.guard.record import Label
from acclimate_service.metrics import Background, Metrics
from acclimate_service.models import Model
from acclimate_service.opening import Redis, Shared
from acclimate_service.scopes import Kept, Scopes
from acclimate_service.settings import Settings
from acclimate_service.shadow import Shadow
from acclimate_service.state import (
    Announcements,
    Census,
    ClientScope,
    EmbeddedRedis,
    Limits,
    Listing,
    OtherModel,
    Places,
    Probe,
    Rates,
    StoreUnavailable,
    Wire,
    always,
)
from acclimate_service.trials.challengers import Challengers
from acclimate_store import Bundle, Catalogue
from acclimate_store.identity import identity_of

_ADAPTER: Final = re.compile(rb'"adapter":"([^"]+)"')
"""Stands at the beginning of an answer."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Service:
    """An open service for the clients of one version of a model.

    `elsewhere` are the clients that had states of other models when it started, by bundle; all of them if `counted`.
    `siblings` are the loaded versions of the model, itself among them, by the scope that they have their states in:
    they know what became of requests that they applied. `under_way` counts requests that were sent to this one; `idle`,
    where somebody waits for their end, is set by the last of them. The `shadow` is shown what was answered.
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
    scope: str
    kept: Kept
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
    rounds: Rounds
    elsewhere: Mapping[str, int]
    counted: bool
    siblings: MutableMapping[str, "Service"] = field(default_factory=dict)
    under_way: int = 0
    idle: asyncio.Event | None = None
    shadow: Shadow | None = None
    sessions: Sessions = field(init=False)
    challengers: Challengers | None = field(init=False)
    model: Mapping[str, str] = field(init=False)
    answered: Counter = field(init=False)
    failed: Counter = field(init=False)

    def __post_init__(self) -> None:
        self.sessions, self.challengers = self.kept.sessions, self.kept.challengers
        name, version = self.bundle.manifest.name, self.bundle.manifest.version
        self.model = {"name": name, "version": version}
        rows = self.metrics.version_rows
        self.answered, self.failed = (rows.labels(name, version, result) for result in ("answered", "failed"))

    def leave(self) -> None:
        """Say so if this was the last request under way, where somebody waits for that."""
        if self.idle is not None and not self.under_way:
            self.idle.set()

    @property
    def fleet(self) -> Fleet | None:
        """Evidence of the adapters of the clients; None if nobody compares."""
        return self.kept.fleet

    @property
    def arms(self) -> Arms | None:
        """Evidence of the arms of portfolios; None if nobody compares."""
        return self.kept.arms

    async def predict(self, batch: Batch) -> Reply:
        """Answer a batch as `Engine.predict` does, and show it to shadow, challengers and the next federated round."""
        with self._waiting(batch.request.client, len(batch.images)):
            if self.rates is not None:
                await self._metered(batch.request.client.owner, len(batch.images))
            try:
                reply = await self.engine.predict(batch)
            except OtherModel as applied:
                if (other := self.siblings.get(applied.model, self)) is self:
                    raise
                return await other.predict(batch)
            except Exception:
                self.failed.inc(len(batch.images))
                raise
            self.answered.inc(len(batch.images))
            self._count(reply, len(batch.images))
        if self.shadow is not None and reply.replayed == "none":
            self.shadow.see(batch, reply)
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


async def open_version(model: Model, shared: Shared, stack: AsyncExitStack) -> Service:
    """Open what serves one version of a model, beside others, and answer a first batch.

    Raises:
        StateError: Redis failed.
    """
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
        scope=lineage.scope,
        kept=kept,
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
        rounds=rounds,
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


def _announcements(redis: Redis, tenant: str, model: str, kept: Kept, watched: Background) -> Announcements:
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


async def _lineage(settings: Settings, shared: Shared, bundle: Bundle, configurations: Configurations) -> ModelLineage:
    """The versions that clients were served, the one of this bundle among them from now on."""
    served = identity_of(bundle.manifest, bundle.model.content_hash, bundle.model.source)
    catalogue = Catalogue(settings.model_store, settings.allowed_imports)
    known = await known_versions(shared.redis.wire, shared.tenant)
    older = await shared.worker.run(partial(older_in_store, catalogue, served, known), always)
    known = await known_versions(shared.redis.wire, shared.tenant, *older, Version(served, configurations.default))
    return ModelLineage(served, known, configurations, bundle.model)


def _of_tenant(census: Census, tenant: str) -> dict[str, int]:
    """Clients of one tenant by model scope."""
    return {scope: clients for (owner, scope), clients in census.clients.items() if owner == tenant}
