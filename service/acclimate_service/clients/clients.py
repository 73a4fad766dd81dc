"""What can be done to a client beside sending it batches: configure, enrol, export, import, reset, delete."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
import torch

from acclimate_adapters import ConfigurationError, InputError, enrols, require
from acclimate_adapters.guard import finite
from acclimate_service.clients import imports
from acclimate_service.clients.imports import Precondition
from acclimate_service.clients.replies import Replies
from acclimate_service.clients.requests import ClientRequest, Reply
from acclimate_service.clients.sessions import Sessions, Turn
from acclimate_service.compute.adapted import Adapted
from acclimate_service.compute.configuration import Configurations
from acclimate_service.compute.labelling import Examples
from acclimate_service.compute.worker import Worker
from acclimate_service.errors import Problem
from acclimate_service.state import (
    Applied,
    Change,
    ClientScope,
    ClientUnknown,
    Description,
    Present,
    StateError,
    StateStore,
)
from acclimate_service.state.errors import Doubt
from acclimate_service.trials.shadows import Guard
from acclimate_store import Bundle

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Exported:
    """A client's state as bytes, and its version."""

    version: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Described:
    """A client's stored configuration, and where its state is and how large."""

    configuration: str
    state: Mapping[str, Any]


class Clients:
    """Administers the clients of one model.

    All methods raise Problem, and StateError of the state protocol. A change is committed whole or not at all.
    """

    def __init__(
        self,
        bundle: Bundle,
        configurations: Configurations,
        store: StateStore,
        sessions: Sessions,
        replies: Replies,
        worker: Worker,
        guard: Guard | None,
    ) -> None:
        """Take over the collaborators; whoever made them closes them."""
        self._bundle = bundle
        self._configurations = configurations
        self._store = store
        self._sessions = sessions
        self._replies = replies
        self._worker = worker
        self._guard = guard

    async def describe(self, client: ClientScope) -> Described:
        """All about a client's state but the state itself."""
        stored = await self._store.describe(client, self._bundle.model.content_hash)
        if stored is None:
            raise ClientUnknown(f"there is no client {client.client!r}; it begins with its first batch")
        session = self._sessions.peek(client)
        in_memory = session is not None and session.version == stored.seq
        return Described(stored.config, _describe(stored, in_memory))

    async def configure(self, request: ClientRequest, configuration: str) -> Reply:
        """Give a client another adapter, which begins anew; nothing happens if it has that one already.

        Args:
            request: a repeated one does not reset again.
            configuration: of a sound adapter, as canonical JSON.
        """
        async with self._sessions.turn(request) as turn:
            initial = await self._work(turn, lambda: self._initial(configuration))
            present = await turn.session.known(turn.request)
            if isinstance(present, Applied):
                return self._configured(present, configuration)
            if present is not None and self._same(present.config, configuration):
                status = "restored" if present.has_state or present.base < present.seq else "reset"
                answer = {**self._configurations.describe(configuration), "changed": False}
                return Reply(answer, present.seq, status, False)
            try:
                applied = await turn.session.reset(turn.request, configuration)
                await self._begin_anew(request.client, applied)
                return self._configured(applied, configuration)
            except ClientUnknown as unknown:
                if unknown.committed:
                    raise

            async def begin(_: Present[Adapted]) -> Change[Adapted]:
                return Change(configuration, initial, b"{}")

            applied = await turn.session.replace(turn.request, begin)
            await self._begin_anew(request.client, applied)
            return self._configured(applied, configuration)

    async def enroll(self, request: ClientRequest, examples: Examples) -> Reply:
        """Let a client begin anew from labelled images of its own."""
        async with self._sessions.turn(request) as turn:

            async def change(present: Present[Adapted]) -> Change[Adapted]:
                return await self._work(turn, lambda: self._enrol(present.config, examples))

            applied = await turn.session.replace(turn.request, change)
            await self._begin_anew(request.client, applied)
            return await self._replies.of(request.client, applied)

    async def export_state(self, request: ClientRequest) -> Exported:
        """The newest state of a client."""
        async with self._sessions.turn(request) as turn:
            present = await turn.session.present()
            if present.seq == 0:
                raise ClientUnknown(f"there is no client {request.client.client!r}; it begins with its first batch")
            return Exported(present.seq, await asyncio.to_thread(present.state.state.to_bytes))

    async def import_state(self, request: ClientRequest, data: bytes, precondition: Precondition) -> Reply:
        """Replace a client's state by one that was exported from a client of the same adapter and model.

        Args:
            request: a repeated one does not import again.
            data: what `State.to_bytes` wrote.
            precondition: on the version that is replaced.
        """
        async with self._sessions.turn(request) as turn:

            async def change(present: Present[Adapted]) -> Change[Adapted]:
                precondition.check(present.seq)
                return await self._work(turn, lambda: self._import(present.config, data))

            applied = await turn.session.replace(turn.request, change)
            await self._begin_anew(request.client, applied)
            return await self._replies.of(request.client, applied)

    async def reset(self, request: ClientRequest) -> Reply:
        """Take a client back to the global model."""
        async with self._sessions.turn(request) as turn:
            adapter = await self._replies.adapter_of(request.client)  # first: nothing may fail after the reset
            await turn.request.admit()
            done = await turn.session.reset(turn.request)
            await self._begin_anew(request.client, done)
            return Reply({"adapter": adapter}, done.seq, "reset", True, done.replayed)

    async def delete(self, request: ClientRequest) -> None:
        """Remove a client and all that was learned for it; nothing happens when there is none."""
        async with self._sessions.turn(request) as turn:
            await turn.request.admit()
            await turn.session.delete()
            if self._guard is not None:
                deleted = Doubt()
                deleted.learn("unknown")  # the client is gone by now, so nobody may say that nothing was changed
                with deleted:
                    await self._guard.forget(request.client)

    async def _begin_anew(self, client: ClientScope, applied: Applied) -> None:
        """Let the evidence of a client that has another state now begin anew; its next labels would do so too."""
        if self._guard is None or applied.replayed != "none":
            return
        with suppress(StateError):
            stored = await self._store.describe(client, self._bundle.model.content_hash)
            if stored is not None:
                await self._guard.fleet.begin_anew(client, stored.config, applied.life, applied.seq)

    async def _work(self, turn: Turn, work: Callable[[], T]) -> T:
        return await self._worker.run(work, turn.request.admit)

    def _configured(self, applied: Applied, configuration: str) -> Reply:
        answer = {**self._configurations.describe(configuration), "changed": True}
        if applied.replayed != "none":  # all there was to answer is known anew
            return Reply(answer, applied.seq, "reset", True, "stored")
        return Reply(answer, applied.seq, applied.status, True)

    def _initial(self, configuration: str) -> Adapted:
        adapter = self._configurations.adapter(configuration)
        try:
            require(adapter, self._bundle.model)
            return Adapted(configuration, adapter.init(self._bundle.model))
        except ConfigurationError as error:  # the model has no such modules, or not that kind of confusion matrix
            raise Problem("unavailable_adapter", f"{error}; GET /adapters lists what can be served") from error

    def _enrol(self, configuration: str, examples: Examples) -> Change[Adapted]:
        adapter = self._configurations.adapter(configuration)
        if not enrols(adapter):
            detail = f"adapter {adapter.name!r} takes no labelled images; GET /adapters lists those with `enrols`"
            raise Problem("enrolment_unsupported", detail)
        labels = torch.from_numpy(examples.labels)
        try:
            state = adapter.init(self._bundle.model, x=self._bundle.prepare(examples.images), labels=labels)
        except InputError as error:
            raise Problem("invalid_labels", str(error)) from error
        if not finite(state):
            raise Problem("non_finite", "these images make a personal head that is not finite; nothing was changed")
        answer = {"adapter": adapter.name, "enrolled": len(labels)}
        return Change(configuration, Adapted(configuration, state), orjson.dumps(answer))

    def _import(self, configuration: str, data: bytes) -> Change[Adapted]:
        adapter = self._configurations.adapter(configuration)
        state = imports.read(data, adapter, self._bundle)
        return Change(configuration, Adapted(configuration, state), orjson.dumps({"adapter": adapter.name}))

    def _same(self, one: str, other: str) -> bool:
        """Whether two configurations are of equal adapters, however many defaults they spell out."""
        try:
            return self._configurations.adapter(one) == self._configurations.adapter(other)
        except ConfigurationError:  # the stored one is of another version of the service
            return False


def _describe(stored: Description, in_memory: bool) -> Mapping[str, Any]:
    return {
        "version": stored.seq,
        "status": "reset" if stored.length == 0 and stored.base == stored.seq else "warm" if in_memory else "restored",
        "bytes": stored.length,
        "tier": "memory" if in_memory else "redis",
        "base": stored.base,
        "journal_entries": stored.journal_entries,
        "journal_bytes": stored.journal_bytes,
        "owner": stored.owner.partition("~")[0] or None,
        "expires_in_s": stored.ttl_ms // 1000,
    }
