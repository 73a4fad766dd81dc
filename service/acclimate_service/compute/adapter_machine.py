"""What the state protocol is given to run: an adapter's states and steps, on the one thread that runs torch."""

import asyncio
import platform
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

import torch

from acclimate_adapters.adapter import complete
from acclimate_adapters.compression.sensitivity import sensitivity
from acclimate_service.compute.adapters import Configurations
from acclimate_service.compute.client_state import ClientState, pack, unpack
from acclimate_service.compute.costs import StepBudget
from acclimate_service.compute.labelling import has_labels, is_light, taking_labels
from acclimate_service.compute.lineage import ModelLineage
from acclimate_service.compute.steps import ImageBatch, Job, StepParameters, Steps
from acclimate_service.compute.worker import Worker
from acclimate_service.errors import Problem
from acclimate_service.state import Batch, Start
from acclimate_store import Bundle
from acclimate_store.bundle import PLAIN

_QUICK: Final = 64 * 1024
"""Bytes of a state above which writing and reading it would hold up the event loop."""
_HEADER_BYTES: Final = 400
_TENSOR_BYTES: Final = 100
"""About what a stored state takes beside its tensors, and beside each."""
_WEIGHED: Final = 16
"""Configurations whose sensitivities are kept; measuring one takes some milliseconds."""


class AdapterMachine:
    """Makes, changes and serialises the states of one model's clients; equal inputs give equal results.

    Attributes:
        steps: takes them, and knows how long they take.
        waiting: bytes of the states that are to be serialised in the background, by their identity.
        hear: called with each step of a portfolio, which needs what labels of all clients say.
    """

    def __init__(
        self,
        bundle: Bundle,
        configurations: Configurations,
        lineage: ModelLineage,
        worker: Worker,
        budget: StepBudget,
        steps: Steps,
        background: Executor,
        *,
        exact_above: int,
        state_budget: float | None = 1.0,
    ) -> None:
        """Take over the collaborators; whoever made them closes them.

        Args:
            bundle, configurations, worker, budget: of the service.
            lineage: the versions of the model.
            steps: of the model.
            background: serialises what nobody waits for.
            exact_above: bytes of states above which steps share no pass with others, which changes their last bits: a
                state that is kept as a journal may have to be computed again.
            state_budget: as in `Settings`.
        """
        self._bundle = bundle
        self._configurations = configurations
        self._lineage = lineage
        self._worker = worker
        self._budget = budget
        self.steps = steps
        self._background = background
        self.waiting: dict[int, int] = {}
        self.hear: Callable[[], None] = _nothing
        self._exact_above = exact_above
        self._state_budget = state_budget
        self._weights = lru_cache(_WEIGHED)(self._weigh)
        # `atp` and others run torch whatever the runtime: both are named
        runtimes = " ".join(dict.fromkeys((f"torch {torch.__version__}", bundle.runtime)))
        layout = "" if bundle.layout == PLAIN else f", {bundle.layout}"
        bound = f", influence {steps.influence:g}" if steps.influence else ""  # another bound computes other states
        self.engine = f"{bundle.model.device.type} {platform.machine()} {runtimes}{layout}{bound}"

    async def initial(self, config: str) -> ClientState:
        """The state of a client that has seen nothing."""
        adapter = self._configurations.adapter(config)
        return ClientState(config, await asyncio.to_thread(adapter.init, self._bundle.model))

    async def step(self, state: ClientState, batch: Batch, start: Start) -> tuple[ClientState, bytes]:
        """Take the adapter's step, guarded, once `start` agrees; or take labels in, which are no step."""
        if isinstance(batch, ImageBatch):
            refusal = self._budget.refusal_of_step(state.configuration, batch.shape[0])
            if refusal is not None:  # what a journal holds was taken once, and is not asked
                raise Problem(*refusal)
            parameters = batch.known
        elif has_labels(batch):
            return await self._label(state, batch, start)
        else:
            parameters = StepParameters.decode(batch.parameters)
        job = Job(state, batch, parameters)
        if self.steps.is_informed(state.configuration):
            self.hear()
        if self.steps.is_sliced(state.configuration):
            done = await self._worker.run_slices(self.steps.slices(job), start)
            if isinstance(done, Exception):
                raise done
            return done
        shares = self.steps.may_share(state.configuration) and self.size(state) <= self._exact_above
        # by the estimate as it was at the start: those who wait were learned of at other times, and are compared
        rows, seconds = batch.shape[0], self._budget.seconds(state.configuration, batch.shape[0])
        return await self._worker.share(self.steps.take, job, rows if shares else None, start, seconds)

    async def _label(self, state: ClientState, batch: Batch, start: Start) -> tuple[ClientState, bytes]:
        adapter = self._configurations.adapter(state.configuration)
        if is_light(batch, adapter):
            await start()
            return complete(taking_labels(adapter, self._bundle, state, batch))
        return await self._worker.run_slices(taking_labels(adapter, self._bundle, state, batch), start)

    async def serialise(self, state: ClientState, *, awaited: bool = True) -> bytes:
        """The bytes of a state and its record, without the configuration."""
        if self.size(state) <= _QUICK:
            return self._pack(state)
        if awaited:
            return await asyncio.to_thread(self._pack, state)
        self.waiting[id(state)] = self.size(state)
        held = [state]  # who gives up lets go of the state at once; the queue of the executor would keep it
        try:
            work = partial(self._pack_held, held)
            return await asyncio.get_running_loop().run_in_executor(self._background, work)
        finally:
            held.clear()
            self.waiting.pop(id(state), None)

    async def deserialise(self, config: str, data: bytes) -> ClientState:
        """The state that `serialise` wrote, rounded as the budget of its writer asked for."""
        state = unpack(config, data) if len(data) <= _QUICK else await asyncio.to_thread(unpack, config, data)
        return replace(state, state=self._lineage.adopted(state.state, config))

    def size(self, state: ClientState) -> int:
        """About how many bytes the exact state takes, here in memory and stored without a budget."""
        record = state.record
        rows = record.rows.nbytes + len(record.batches) if record else 0
        return state.state.nbytes + rows + _HEADER_BYTES + _TENSOR_BYTES * len(state.state.tensors)

    def adapter(self, state: ClientState) -> str:
        """Name of the adapter that made the state."""
        return state.state.adapter

    def _pack(self, state: ClientState) -> bytes:
        budget = self._state_budget
        if budget is None:
            budget = self._bundle.manifest.state_budget(state.state.adapter)
        return pack(state, budget, self._weights(state.configuration))

    def _pack_held(self, held: list[ClientState]) -> bytes:
        return self._pack(held[0])

    def _weigh(self, configuration: str) -> Mapping[str, float]:
        return sensitivity(self._configurations.adapter(configuration), self._bundle.model)


def _nothing() -> None:
    """Nobody has anything to hear."""
