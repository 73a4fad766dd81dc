"""States that no batch made: initial ones, those of an enrolment, and those that come from outside."""

from collections.abc import Generator
from functools import partial
from typing import Final

import numpy as np
import torch

from acclimate_adapters import (
    Adapter,
    ConfigurationError,
    InputError,
    Labelled,
    State,
    StateCorrupt,
    StateMismatch,
    enrols,
    learns,
    require,
)
from acclimate_adapters.adapter import slices
from acclimate_adapters.guard import finite
from acclimate_service.compute.adapters import Configurations
from acclimate_service.compute.client_state import ClientState
from acclimate_service.compute.costs import StepBudget
from acclimate_service.compute.labelling import Examples
from acclimate_service.compute.lineage import ModelLineage
from acclimate_service.compute.worker import Admit, Worker
from acclimate_service.errors import Problem
from acclimate_store import Bundle

MAX_STATE_HEADER: Final = 100_000
"""Bytes of the header of a state that comes from outside. Its JSON is parsed whole, whatever its length says."""

_TRIED: Final = 2
"""Images on which a state from outside has to show that a step from it succeeds."""


class NewStates:
    """Makes states for the clients of one model, on the thread that runs torch.

    All methods await `admit` before they begin, and raise what it raises.
    """

    def __init__(
        self, bundle: Bundle, configurations: Configurations, lineage: ModelLineage, worker: Worker, budget: StepBudget
    ) -> None:
        self._budget = budget
        self._bundle = bundle
        self._configurations = configurations
        self._lineage = lineage
        self._worker = worker

    async def initial(self, configuration: str, admit: Admit) -> ClientState:
        """The state that a client with this configuration begins with.

        Raises:
            Problem: `unavailable_adapter`, `adapter_not_allowed`; `step_too_costly` if a single image is.
        """
        return await self._worker.run(partial(self._initial, configuration), admit)

    async def enrolled(self, configuration: str, examples: Examples, admit: Admit) -> ClientState:
        """The state of a client that begins with labelled images of its own.

        Raises:
            Problem: `enrolment_unsupported`, `invalid_labels`, `non_finite`, or as `initial`.
        """
        self._budget.require(configuration)
        self._budget.require_lesson(configuration, len(examples.labels))
        return await self._worker.run(partial(self._enrolled, configuration, examples), admit)

    async def imported(self, configuration: str, data: bytes, admit: Admit) -> ClientState:
        """The state that `State.to_bytes` wrote as `data`, once it is sure that the client's adapter can go on from it.

        Raises:
            Problem: `invalid_state`, or `state_mismatch` for a state of another adapter, layout or model; or as
                `initial`.
        """
        self._budget.require(configuration, _TRIED)
        self._budget.require_lesson(configuration, _TRIED)
        return await self._worker.run_slices(self._imported(configuration, data), admit)

    def _initial(self, configuration: str) -> ClientState:
        adapter = self._configurations.adapter(configuration)
        try:
            require(adapter, self._bundle.model)
            self._budget.require(configuration)
            return ClientState(configuration, adapter.init(self._bundle.model))
        except ConfigurationError as error:  # the model has no such modules, or not that kind of confusion matrix
            raise Problem("unavailable_adapter", f"{error}; GET /adapters lists what can be served") from error

    def _enrolled(self, configuration: str, examples: Examples) -> ClientState:
        adapter = self._configurations.adapter(configuration)
        if not enrols(adapter):
            detail = f"adapter {adapter.name!r} takes no labelled images; GET /adapters lists those with `enrols`"
            raise Problem("enrolment_unsupported", detail)
        x, labels = self._bundle.prepare(examples.images), torch.from_numpy(examples.labels)
        try:
            state = adapter.init(self._bundle.model, x=x, labels=labels)
        except InputError as error:
            raise Problem("invalid_labels", str(error)) from error
        if not finite(state):
            raise Problem("non_finite", "these images make a personal head that is not finite; nothing was changed")
        return ClientState(configuration, state)

    def _imported(self, configuration: str, data: bytes) -> Generator[None, None, ClientState]:
        adapter = self._configurations.adapter(configuration)
        length = int.from_bytes(data[:8], "little")
        if length > MAX_STATE_HEADER:
            detail = f"the header of the state has {length} bytes; accepted are {MAX_STATE_HEADER}"
            raise Problem("invalid_state", detail)
        try:
            state = self._lineage.adopted(State.from_bytes(data), configuration)
            state.require(adapter.name, adapter.layout, self._bundle.model.content_hash)
        except StateCorrupt as error:
            raise Problem("invalid_state", f"{error}; send what GET /clients/{{id}}/state gave") from error
        except StateMismatch as error:
            raise Problem("state_mismatch", f"{error}; configure the client first, or send its own state") from error
        _check_content(state, adapter, self._bundle)
        yield from _check_use(state, adapter, self._bundle)
        return ClientState(configuration, state)


def _check_content(state: State, adapter: Adapter, bundle: Bundle) -> None:
    try:
        state.require_form(adapter.form(bundle.model, state))
    except StateMismatch as error:
        raise Problem("invalid_state", f"{error}, as adapter {adapter.name!r} needs it") from error
    if not finite(state):
        raise Problem("invalid_state", "the state holds numbers that are not finite")


def _check_use(state: State, adapter: Adapter, bundle: Bundle) -> Generator[None, None, None]:
    """Learn and take a step for nobody: counts and indices may be such that no step succeeds."""
    x = bundle.prepare(np.zeros((_TRIED, *bundle.manifest.input.shape), np.uint8))
    try:
        if learns(adapter):
            state = adapter.learn(bundle.model, state, Labelled(torch.zeros(_TRIED, dtype=torch.int64), x))
        step = yield from slices(adapter, bundle.model, state, x)
        sound = finite(step.state)
    except Exception as error:  # an adapter may raise anything on numbers that it never makes
        raise Problem(
            "invalid_state", f"adapter {adapter.name!r} cannot go on from the state: {error}"[:300]
        ) from error
    if not sound:
        raise Problem("invalid_state", f"a step from this state is not finite under adapter {adapter.name!r}")
