"""Federated rounds of Fed-ADE among the clients of one model (Park et al., 2026, Algorithm 1), run by the service.

Clients with the adapter `fed_ade` and `layers="all"` share all layers but the classifier. A round samples recently
active ones, computes each client's update (Eq. 6), averages the shared layers into a new version of the cohort (Eq. 7)
and lets each participant finish with its personal layers (Eq. 8), as one change of that client, exactly once.

Whoever holds the cohort's lease runs a round. If it dies before the new version is there, the last complete one stands
and nothing has changed; if it dies after that, the next round is its rest. Clients that go away meanwhile are left out.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import orjson
import safetensors.torch
from torch import Tensor

from acclimate_adapters import AcclimateError, FrozenModel
from acclimate_adapters.methods.fed_ade.client import FedAde
from acclimate_adapters.methods.fed_ade.rounds import Update, aggregate, finish, initial_shared, local_update
from acclimate_service.clients.requests import BACKGROUND_PATIENCE_S, ClientRequest, never_gone
from acclimate_service.clients.sessions import Sessions, Turn
from acclimate_service.compute.adapters import Configurations
from acclimate_service.compute.client_state import ClientState
from acclimate_service.compute.worker import Worker
from acclimate_service.errors import Problem
from acclimate_service.federated.cohorts import Cohort, Cohorts, Layers
from acclimate_service.metrics import Background
from acclimate_service.state import (
    Change,
    ClientScope,
    Present,
    StateCorrupt,
    StateError,
    StateUnreadable,
    StoreFull,
    StoreUnavailable,
    Tasks,
    always,
    event,
    new_id,
    random_rid,
)

_KEPT = 256
"""Configurations of which it is remembered whether they take part."""
_log = logging.getLogger(__name__)
Shared = Mapping[str, Tensor]


class RoundBusy(StateError):
    """Another replica runs a round."""


class _SitsOut(Exception):
    """The client does not take part, or no longer."""


@dataclass(frozen=True, slots=True)
class Round:
    """What a round came to: the cohort's version, and how many clients finished it."""

    version: int
    clients: int


class Rounds:
    """Runs the rounds of one model on this replica.

    Args:
        model, configurations, sessions, worker: of the service.
        cohorts: what the clients share.
        tenant: whose clients.
        background: watches over what nobody waits for.

    Attributes:
        joins: whether clients of a configuration take part in rounds.
    """

    def __init__(
        self,
        model: FrozenModel,
        configurations: Configurations,
        sessions: Sessions,
        worker: Worker,
        cohorts: Cohorts,
        *,
        tenant: str,
        background: Background,
    ) -> None:
        self._model = model
        self._configurations = configurations
        self._sessions = sessions
        self._worker = worker
        self._cohorts = cohorts
        self._tenant = tenant
        self._background = background
        self._tasks = Tasks(background)
        self._noting: dict[str, asyncio.Task[None]] = {}  # the latest of each client
        self.joins = lru_cache(_KEPT)(self._joins)

    def note(self, client: ClientScope) -> None:
        """Remember in the background that a client is active, which may fail: the next batch tells again."""
        task = self._noting[client.client] = self._tasks.start("cohort_note", self._cohorts.note(client.client))
        task.add_done_callback(partial(self._noted, client.client))

    async def forget(self, client: ClientScope) -> None:
        """Forget that a client was active, which is deleted; raises StateError where Redis fails."""
        if client.client in self._noting:
            await asyncio.wait([self._noting[client.client]])
        await self._cohorts.forget(client.client)

    def _joins(self, configuration: str) -> bool:
        return isinstance(self._configurations.adapter(configuration), FedAde)

    def _noted(self, client: str, task: asyncio.Task[None]) -> None:
        if self._noting.get(client) is task:
            del self._noting[client]

    async def run(self, most: int) -> Round:
        """Run one round, or the rest of one that was left unfinished.

        Args:
            most: clients that may take part.

        Raises:
            RoundBusy: another replica runs one.
            StateError: Redis failed, or another round came between; the last complete version stands.
        """
        async with self._lease():
            cohort = await self._cohorts.load()
            if cohort.unfinished:
                return await self._finish(cohort)
            before = await self._layers(cohort.layers)
            active = await self._cohorts.active()
            chosen = random.sample(active, min(most, len(active)))
            mean, participants = await self._average(chosen, before, cohort.version)
            if mean is None:
                return Round(cohort.version, 0)
            data = await asyncio.to_thread(safetensors.torch.save, dict(mean.shared))
            return await self._finish(await self._cohorts.advance(cohort, data, participants))

    def repeat(self, interval_s: float, most: int) -> None:
        """Run a round every so many seconds in the background, on one of all replicas that do the same."""
        self._tasks.start("rounds", self._repeat(interval_s, most))

    async def _repeat(self, interval_s: float, most: int) -> None:
        while True:
            await asyncio.sleep(interval_s * random.uniform(0.9, 1.1))
            try:
                age_ms = (await self._cohorts.load()).age_ms
                if age_ms is None or age_ms >= 900 * interval_s:
                    await self.run(most)
                self._background.succeeded("round")
            except RoundBusy:
                pass
            except Exception as error:  # the last complete version stands, and the next round may succeed
                self._background.failed("round", error)

    async def aclose(self) -> None:
        """End what runs in the background."""
        await self._tasks.aclose()

    async def _average(self, chosen: list[str], before: Shared, r: int) -> tuple[Update | None, list[str]]:
        """The participants' mean (Eq. 7), folded one by one: the layers of one client at a time are in memory."""
        mean: Update | None = None
        participants: list[str] = []
        for client in chosen:
            with suppress(_SitsOut):
                present = await self._present(client)
                mean = await self._worker.run(partial(self._fold, mean, present, before, r), always)
                participants.append(client)
        return mean, participants

    def _fold(self, mean: Update | None, present: Present[ClientState], before: Shared, r: int) -> Update:
        try:
            update = local_update(self._member(present), self._model, present.state.state, before, r)
            known = () if mean is None else (mean,)
            shared = aggregate(before, (*known, update))
        except AcclimateError as error:
            _log.warning("a client sits the round out: %s", error)
            raise _SitsOut from error
        return Update(shared, update.samples + (mean.samples if mean else 0), update.state)

    async def _finish(self, cohort: Cohort) -> Round:
        """Eq. 8 of every participant; of those that finished before, nothing is left to do."""
        before, after = await self._layers(cohort.previous), await self._layers(cohort.layers)
        finished = 0
        for client in cohort.unfinished:
            wanted = self._request(client, f"\n{cohort.tag}")  # no caller's key holds a line break
            try:
                async with self._sessions.turn(wanted) as turn:
                    change = partial(self._finished, turn, cohort.version - 1, before, after)
                    await turn.session.apply(turn.request, change)
                finished += 1
            except (StoreUnavailable, StoreFull):
                raise
            except (_SitsOut, Problem, StateError, AcclimateError) as error:
                _log.warning("a client does not finish the round: %s", error or "it takes part no longer")
        await self._cohorts.settle(cohort)
        return Round(cohort.version, finished)

    async def _finished(
        self, turn: Turn, r: int, before: Shared, after: Shared, present: Present[ClientState]
    ) -> Change[ClientState]:
        def work() -> Change[ClientState]:
            adapter = self._member(present)
            try:
                update = local_update(adapter, self._model, present.state.state, before, r)
                state = finish(adapter, self._model, update.state, after, r)
            except AcclimateError as error:
                raise _SitsOut from error
            answer = {"adapter": adapter.name, "round": r + 1}
            return Change(
                present.config, replace(present.state, state=state), orjson.dumps(answer), point=event("round")
            )

        return await self._worker.run(work, turn.request.admit)

    async def _present(self, client: str) -> Present[ClientState]:
        try:
            async with self._sessions.turn(self._request(client)) as turn:
                return await turn.session.present()
        except (StateCorrupt, StateUnreadable, Problem, AcclimateError) as error:
            raise _SitsOut from error

    def _request(self, client: str, key: str | None = None) -> ClientRequest:
        scope = ClientScope(client, self._tenant)
        rid = random_rid() if key is None else scope.rid(key)
        return ClientRequest(
            client=scope,
            rid=rid,
            fingerprint="round",
            deadline=time.monotonic() + BACKGROUND_PATIENCE_S,
            gone=never_gone,
        )

    def _member(self, present: Present[ClientState]) -> FedAde:
        """The adapter of a client that takes part: it is there, is not paused, and has a batch to adapt to."""
        adapter = self._configurations.adapter(present.config)
        adapts = present.state.state.step > 0 and not present.paused
        if adapts and isinstance(adapter, FedAde) and adapter.layers == "all":
            return adapter
        raise _SitsOut

    async def _layers(self, layers: Layers | None) -> Shared:
        if layers is None:
            return initial_shared(self._model)
        data = await self._cohorts.read(layers)
        return await asyncio.to_thread(safetensors.torch.load, data)

    @asynccontextmanager
    async def _lease(self) -> AsyncIterator[None]:
        """Hold the lease for the block. Losing it is harmless: the compare-and-set refuses whoever comes late."""
        holder = new_id()
        if await self._cohorts.lease(holder) is not None:
            raise RoundBusy("another replica runs a round of this cohort; the lease of one that died ends in seconds")
        renewal = asyncio.create_task(self._renew(holder))
        try:
            yield
        finally:
            renewal.cancel()
            with suppress(StateError):  # it ends by itself
                await self._cohorts.release(holder)

    async def _renew(self, holder: str) -> None:
        while True:
            await asyncio.sleep(self._cohorts.renew_s)
            with suppress(StateError):
                await self._cohorts.lease(holder)
