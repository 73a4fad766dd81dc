"""What one replica keeps of its clients, scope by scope: their own states, and those of challengers beside them."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry

from acclimate_adapters import FrozenModel
from acclimate_adapters.labels import Informed
from acclimate_service.clients.sessions import Sessions
from acclimate_service.compute.adapter_machine import AdapterMachine
from acclimate_service.compute.adapters import Configurations
from acclimate_service.compute.client_state import ClientState
from acclimate_service.compute.device_cache import DeviceCache
from acclimate_service.compute.lineage import ModelLineage, known_versions
from acclimate_service.federated.cohorts import Cohorts
from acclimate_service.guard.arms import Arms, Rows, Shares
from acclimate_service.guard.evidence import Counts
from acclimate_service.guard.fleet import Fleet, Heard
from acclimate_service.guard.policy import Policy as AnswerPolicy
from acclimate_service.guard.pools import Pools
from acclimate_service.guard.questions import Questions
from acclimate_service.metrics import Metrics, StateMetrics
from acclimate_service.settings import Settings
from acclimate_service.state import (
    ClientScope,
    Context,
    Limits,
    Places,
    Policy,
    ReplayQueue,
    Session,
    StateStore,
    Wire,
    new_id,
)
from acclimate_service.trials.challengers import Challenger, Challengers, scope_of

_log = logging.getLogger(__name__)
_ARMS: Final = "arms"
"""Scope of what labels say of the arms of portfolios, beside the model's."""


@dataclass(frozen=True, slots=True)
class Kept:
    """All that is kept of the clients of one model.

    Args:
        sessions: of the states that they are answered by.
        fleet: evidence of their adapters; None if nobody compares.
        arms: evidence of the arms of portfolios; None if nobody compares.
        questions: what they are asked; None if nobody compares.
        challengers: with their states beside those; None if nobody is tried out.
    """

    sessions: Sessions
    fleet: Fleet | None
    arms: Arms | None
    questions: Questions | None
    challengers: Challengers | None

    @property
    def everywhere(self) -> Sequence[Sessions]:
        """The sessions of all scopes, the clients' own states first."""
        return [self.sessions, *(self.challengers.sessions if self.challengers else ())]

    @property
    def evidence(self) -> Sequence[Heard[Any]]:
        """All that labels say."""
        return [each for each in (self.fleet, self.arms) if each is not None]

    def divide(self, parts: int) -> None:
        """Let so many versions of the model share the memory that there is for its clients."""
        for sessions in self.everywhere:
            sessions.divide(parts)

    async def aclose(self, budget_s: float) -> None:
        """Write away what is in memory, all within one budget. What fails is logged, and keeps nothing else from it."""
        until = time.monotonic() + budget_s
        closing = [] if self.challengers is None else [self.challengers.stop]
        closing += [partial(_close_until, until, sessions) for sessions in self.everywhere]
        closing += [each.aclose for each in self.evidence]
        closing += [] if self.questions is None else [self.questions.aclose]
        for close in closing:
            try:
                await close()
            except Exception:
                _log.exception("not everything of the clients in memory was written away")


async def _close_until(until: float, sessions: Sessions) -> None:
    await sessions.aclose(max(0.0, until - time.monotonic()))


@dataclass(frozen=True, slots=True)
class Scopes:
    """Makes the sessions and the evidence of any scope of one model.

    Args:
        settings, limits, metrics, wire, store, machine: of the service.
        lineage: which names the scopes.
        places: of the clients.
        replays: of all sessions.
    """

    settings: Settings
    limits: Limits
    metrics: Metrics
    wire: Wire
    store: StateStore
    machine: AdapterMachine
    lineage: ModelLineage
    places: Places
    replays: ReplayQueue = field(default_factory=ReplayQueue)

    def kept(self, model: FrozenModel, configurations: Configurations, candidates: Sequence[str]) -> Kept:
        """What is kept of the clients of a model, while these candidates are tried out."""
        settings, key = self.settings, self.lineage.key
        fleet = arms = questions = challengers = None
        if settings.guard != "off":
            fleet = self.evidence(key, settings.guard, settings.guard_alpha, self.lineage.siblings)
            arms = self.arms(scope_of(key, _ARMS), model, configurations)
            questions = self._questions(self.lineage.scope)
        beside_bytes = settings.cache_bytes // 4 if candidates and fleet is not None else 0
        own_bytes = settings.cache_bytes - beside_bytes
        sessions = self.sessions(self.lineage.scope, configurations.default, own_bytes, self.metrics.state)
        if fleet is not None and candidates:
            challengers = self.challengers(candidates, fleet, beside_bytes)
        return Kept(sessions, fleet, arms, questions, challengers)

    def evidence(self, scope: str, policy: AnswerPolicy, alpha: float, others: Sequence[str] = ()) -> Fleet:
        """What the labels of all clients say in one scope; `others` are those of other versions of the model."""
        return Fleet(
            self._pools(scope),
            policy,
            self.metrics.background,
            alpha=alpha,
            needed=self.settings.guard_clients,
            others=[self._pools(other) for other in others],
        )

    async def forget(self, versions: str, client: ClientScope) -> None:
        """Have nothing left of a deleted client beside its states, whichever version of a model it was told of.

        Args:
            versions: tenant under which the versions of models are noted.
            client: which.

        Raises:
            StateError: Redis failed.
        """
        known = await known_versions(self.wire, versions)
        keys = {place.key for place in known}
        scopes = {*keys, *(scope_of(key, _ARMS) for key in keys)}
        cohorts = [Cohorts(self.wire, self.limits, key, self.settings.tenant) for key in keys]
        asked = [self._pools(scope).forget(client) for scope in scopes]
        asked += [cohort.forget(client.client) for cohort in cohorts]
        asked += [self._questions(scope).forget(client) for scope in {place.scope for place in known}]
        for failure in await asyncio.gather(*asked, return_exceptions=True):  # all at once, and none left out
            if failure is not None:
                raise failure

    def arms(self, scope: str, model: FrozenModel, configurations: Configurations) -> Arms:
        """What the labels of all clients say of the arms of portfolios in one scope."""
        settings = self.settings

        def shares(configuration: str, kinds: Sequence[int]) -> Shares:
            adapter = configurations.adapter(configuration)
            assert isinstance(adapter, Informed)
            return adapter.shares(model, kinds)

        pools = Pools(Rows, self.wire, self.limits, scope, settings.tenant, settings.secret)
        return Arms(pools, self.metrics.background, shares)

    def sessions(self, scope: str, configuration: str, budget: int, observer: StateMetrics | None = None) -> Sessions:
        """The sessions of one scope.

        Args:
            scope: of the lineage, for the states that clients are answered by; else of states beside them.
            configuration: of new clients.
            budget: bytes of states in memory.
            observer: told of what happens; None where nobody is shown it.
        """
        settings, own = self.settings, scope == self.lineage.scope
        policy = Policy(
            configuration,
            journal=settings.journal,
            strict_engine=settings.strict_replay,
            keep=settings.keep_snapshots if own else 0,
            timeline=settings.timeline and own,
        )
        lineage = self.lineage if own else self.lineage.beside()
        watching = observer or StateMetrics(CollectorRegistry())

        def begin(client: ClientScope) -> Session[ClientState]:
            context = Context(
                store=self.store,
                limits=self.limits,
                client=client,
                model=scope,
                machine=self.machine,
                policy=policy,
                observer=watching,
                watch=self.metrics.background,
                nonce=f"{settings.replica}~{new_id()}",
                replays=self.replays,
                places=self.places if own else None,  # beside its own state a client has a place already
                lineage=lineage,
            )
            return Session(context)

        device_cache = None if settings.device == "cpu" else DeviceCache(settings.device_cache_bytes)
        waiting = self.machine.waiting if own else {}  # whosever states they are, they count once
        return Sessions(begin, budget, self.metrics.background, device_cache, waiting)

    def challengers(self, names: Sequence[str], fleet: Fleet, budget: int) -> Challengers:
        """Whoever is tried out beside the clients' own adapters.

        Args:
            names: their configurations.
            fleet: told what labels say of them.
            budget: bytes of their states in memory, all together.
        """
        each_bytes = budget // len(names)
        each = [Challenger(name, self.sessions(scope_of(self.lineage.scope, name), name, each_bytes)) for name in names]
        return Challengers(each, self.settings.candidate_share, fleet, self.metrics.background)

    def _questions(self, scope: str) -> Questions:
        return Questions(self.wire, self.limits, self.metrics.background, scope, self.settings.tenant)

    def _pools(self, scope: str) -> Pools[Counts]:
        return Pools(Counts, self.wire, self.limits, scope, self.settings.tenant, self.settings.secret)
