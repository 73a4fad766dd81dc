"""What can be done to a client beside sending it batches: configure, enrol, export, import, reset, delete."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
import torch
from numpy.typing import NDArray

from acclimate_adapters import ConfigurationError, InputError, State, enrols, require
from acclimate_service import imports
from acclimate_service.changes import Changes, Reply, Request
from acclimate_service.configuration import Configurations
from acclimate_service.imports import Precondition
from acclimate_service.problems import Problem
from acclimate_service.state import ClientScope, Replay
from acclimate_service.states import Change, ClientStates, Found, unknown
from acclimate_service.worker import Worker
from acclimate_store import Bundle

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Examples:
    """Labelled images of a client."""

    images: NDArray[Any]  # [N, C, H, W], uint8 or float32, before normalisation
    labels: NDArray[Any]  # [N], int64 in 0..K-1


@dataclass(frozen=True, slots=True)
class Exported:
    """A client's state as bytes, and its version."""

    version: int
    data: bytes


class Clients:
    """Administers the clients of one model.

    All methods raise Problem, and StateError where Redis fails. A change is committed whole or not at all.
    """

    def __init__(
        self, bundle: Bundle, configurations: Configurations, states: ClientStates, changes: Changes, worker: Worker
    ) -> None:
        """Take over the collaborators; whoever made them closes them."""
        self._bundle = bundle
        self._configurations = configurations
        self._states = states
        self._changes = changes
        self._worker = worker

    async def configure(self, request: Request, configuration: str) -> Reply:
        """Give a client another adapter, which begins anew; nothing happens if it has that one already.

        Args:
            request: a repeated one does not reset again.
            configuration: of a sound adapter, as canonical JSON.
        """
        answer = {**self._configurations.describe(configuration), "changed": True}
        async with self._changes.turn(request):
            initial = await self._work(request, lambda: self._initial(configuration))
            present = await self._states.head(request.client, request.rid, request.fingerprint)
            if isinstance(present, Replay) and present.model != self._states.model:
                return await self._changes.replayed(request.client, present)
            if isinstance(present, Replay):
                return Reply(answer, present.seq, "reset", True, "stored")
            if present is not None:
                if self._same(present.config, configuration):
                    status = "restored" if present.has_state else "reset"
                    return Reply({**answer, "changed": False}, present.seq, status, False)
                done = await self._states.reset(request.client, request.attempt(), configuration)
                if done is not None:
                    return Reply(answer, done[0], "reset", True, done[1])

            async def begin(_: Found) -> Change:
                data = await asyncio.to_thread(initial.to_bytes)
                return Change(configuration, initial, data, orjson.dumps(answer))

            return await self._changes.apply(request, begin)

    async def enroll(self, request: Request, examples: Examples) -> Reply:
        """Let a client begin anew from labelled images of its own."""

        async def change(found: Found) -> Change:
            return await self._work(request, lambda: self._enrol(found.configuration, examples))

        async with self._changes.turn(request):
            return await self._changes.apply(request, change)

    async def export_state(self, client: ClientScope) -> Exported:
        """The newest state of a client."""
        found = await self._states.look(client)
        if found.status == "cold":
            raise unknown(client)
        return Exported(found.basis.seq, await asyncio.to_thread(found.state.to_bytes))

    async def import_state(self, request: Request, data: bytes, precondition: Precondition) -> Reply:
        """Replace a client's state by one that was exported from a client of the same adapter and model.

        Args:
            request: a repeated one does not import again.
            data: what `State.to_bytes` wrote.
            precondition: on the version that is replaced.
        """

        async def change(found: Found) -> Change:
            precondition.check(found.basis.seq)
            return await self._work(request, lambda: self._import(found.configuration, data))

        async with self._changes.turn(request):
            return await self._changes.apply(request, change)

    async def reset(self, request: Request) -> Reply:
        """Take a client back to the global model."""
        async with self._changes.turn(request):
            adapter = await self._states.adapter_of(request.client)  # first: nothing may fail after the reset
            done = await self._states.reset(request.client, request.attempt())
            if done is None:
                raise unknown(request.client)
            version, replayed = done
            return Reply({"adapter": adapter}, version, "reset", True, replayed)

    async def delete(self, request: Request) -> None:
        """Remove a client and all that was learned for it; nothing happens when there is none."""
        async with self._changes.turn(request):
            await self._states.delete(request.client)

    async def _work(self, request: Request, work: Callable[[], T]) -> T:
        return await self._worker.run(work, request.admit, request.patience)

    def _initial(self, configuration: str) -> State:
        adapter = self._configurations.adapter(configuration)
        try:
            require(adapter, self._bundle.model)
            return adapter.init(self._bundle.model)
        except ConfigurationError as error:  # the model has no such modules, or not that kind of confusion matrix
            raise Problem("unavailable_adapter", f"{error}; GET /adapters lists what can be served") from error

    def _enrol(self, configuration: str, examples: Examples) -> Change:
        adapter = self._configurations.adapter(configuration)
        if not enrols(adapter):
            detail = f"adapter {adapter.name!r} takes no labelled images; GET /adapters lists those with `enrols`"
            raise Problem("enrolment_unsupported", detail)
        labels = torch.from_numpy(examples.labels)
        try:
            state = adapter.init(self._bundle.model, x=self._bundle.prepare(examples.images), labels=labels)
        except InputError as error:
            raise Problem("invalid_labels", str(error)) from error
        if not imports.finite(state):
            raise Problem("non_finite", "these images make a personal head that is not finite; nothing was changed")
        answer = {"adapter": adapter.name, "enrolled": len(labels)}
        return Change(configuration, state, state.to_bytes(), orjson.dumps(answer))

    def _import(self, configuration: str, data: bytes) -> Change:
        adapter = self._configurations.adapter(configuration)
        state = imports.read(data, adapter, self._bundle)
        return Change(configuration, state, state.to_bytes(), orjson.dumps({"adapter": adapter.name}))

    def _same(self, one: str, other: str) -> bool:
        """Whether two configurations are of equal adapters, however many defaults they spell out."""
        try:
            return self._configurations.adapter(one) == self._configurations.adapter(other)
        except ConfigurationError:  # the stored one is of another version of the service
            return False
