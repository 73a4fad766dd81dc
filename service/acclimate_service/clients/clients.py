"""What can be done to a client beside sending it batches: configure, enrol, export, import, reset, delete."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import orjson

from acclimate_adapters import ConfigurationError
from acclimate_service.clients.requests import ClientRequest, Precondition, Replies, Reply, rfc3339
from acclimate_service.clients.sessions import Sessions, Turn
from acclimate_service.compute.adapters import Configurations
from acclimate_service.compute.client_state import ClientState
from acclimate_service.compute.labelling import Examples
from acclimate_service.compute.new_states import NewStates
from acclimate_service.guard.fleet import Fleet
from acclimate_service.guard.questions import Questions
from acclimate_service.state import (
    Applied,
    Change,
    ClientScope,
    ClientUnknown,
    Description,
    Doubt,
    Present,
    StateError,
    VersionUnknown,
    event,
)


@dataclass(frozen=True, slots=True)
class Exported:
    """A client's state as bytes, its version, and the configuration of its adapter."""

    version: int
    data: bytes
    configuration: str


@dataclass(frozen=True, slots=True)
class Described:
    """A client's stored configuration, whether it is paused, and where its state is and how large."""

    configuration: str
    paused: bool
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a client is to be served; what is None stays as it is.

    Args:
        configuration: of a sound adapter, as canonical JSON.
        paused: whether its batches are answered and not folded in.
    """

    configuration: str | None
    paused: bool | None = None


class Clients:
    """Administers the clients of one model.

    All methods raise Problem, and StateError of the state protocol. A change is committed whole or not at all.
    """

    def __init__(
        self,
        configurations: Configurations,
        sessions: Sessions,
        replies: Replies,
        new_states: NewStates,
        fleet: Fleet | None,
        questions: Questions | None,
        forgetting: Sequence[Callable[[ClientScope], Awaitable[None]]],
    ) -> None:
        """Take over the collaborators; whoever made them closes them.

        Args:
            configurations, sessions, replies, new_states: of the service.
            fleet: evidence of the clients' adapters, which restarts with a client's state; None if nobody compares.
            questions: the list of what clients are asked; None if nobody compares.
            forgetting: have what is known of a client beside its state forgotten, once it is deleted.
        """
        self._configurations = configurations
        self._sessions = sessions
        self._replies = replies
        self._new_states = new_states
        self._fleet = fleet
        self._questions = questions
        self._forgetting = forgetting

    async def describe(self, client: ClientScope) -> Described:
        """All about a client's state but the state itself."""
        stored = await self._replies.describe(client)
        if stored is None:
            raise _no_client(client)
        session = self._sessions.peek(client)
        held = session.memory.held if session else None
        in_memory = held is not None and held.seq == stored.seq
        nbytes = await self._replies.footprint(client)
        return Described(stored.config, stored.paused, _describe(stored, in_memory, nbytes))

    async def configure(self, request: ClientRequest, wanted: Wanted) -> Reply:
        """Give a client another adapter, under which it restarts, and pause it or go on; what it has already stays.

        Args:
            request: a repeated one changes nothing.
            wanted: what it is to have.
        """
        async with self._sessions.turn(request) as turn:
            return await self._configured(turn, request.client, wanted)

    async def enroll(self, request: ClientRequest, examples: Examples) -> Reply:
        """Let a client restart from labelled images of its own."""
        async with self._sessions.turn(request) as turn:

            async def change(present: Present[ClientState]) -> Change[ClientState]:
                state = await self._new_states.enrolled(present.config, examples, turn.request.admit)
                answer = {"adapter": state.state.adapter, "enrolled": len(examples.labels)}
                return Change(present.config, state, orjson.dumps(answer), point=event("enrolled"))

            applied = await turn.session.apply(turn.request, change)
            await self._restart_evidence(request.client, applied)
            return await self._replies.of(request.client, applied)

    async def export_state(self, request: ClientRequest) -> Exported:
        """The newest state of a client."""
        async with self._sessions.turn(request) as turn:
            present = await turn.session.present()
            if present.seq == 0:
                raise _no_client(request.client)
            return Exported(present.seq, await asyncio.to_thread(present.state.state.to_bytes), present.config)

    async def import_state(self, request: ClientRequest, data: bytes, precondition: Precondition) -> Reply:
        """Replace a client's state by one that was exported from a client of the same adapter and model.

        Args:
            request: a repeated one does not import again.
            data: what `State.to_bytes` wrote.
            precondition: on the version that is replaced.
        """
        async with self._sessions.turn(request) as turn:

            async def change(present: Present[ClientState]) -> Change[ClientState]:
                precondition.check(present.seq)
                state = await self._new_states.imported(present.config, data, turn.request.admit)
                answer = orjson.dumps({"adapter": state.state.adapter})
                return Change(present.config, state, answer, point=event("imported"))

            applied = await turn.session.apply(turn.request, change)
            await self._restart_evidence(request.client, applied)
            return await self._replies.of(request.client, applied)

    async def roll_back(self, request: ClientRequest, version: int) -> Reply:
        """Let a client go on from a state that it had, with the adapter that it had then.

        Args:
            request: a repeated one does not go back again.
            version: of that state; 0 for the newest that is kept.
        """
        async with self._sessions.turn(request) as turn:

            async def change(present: Present[ClientState]) -> Change[ClientState]:
                if present.seq == 0:
                    raise _no_client(request.client)
                earlier = await turn.session.earlier(version)
                if earlier.state.state.model != present.state.state.model:
                    detail = (
                        f"version {earlier.seq} was made by another version of the model, and is of no use to this one"
                    )
                    raise VersionUnknown(detail)
                state = replace(earlier.state, record=None)  # labels told since are of rows that others answered
                answer = {"adapter": state.state.adapter, "restored": earlier.seq}
                return Change(earlier.config, state, orjson.dumps(answer), back=earlier.seq, point=event("rollback"))

            applied = await turn.session.apply(turn.request, change)
            await self._restart_evidence(request.client, applied)
            return await self._replies.of(request.client, applied)

    async def reset(self, request: ClientRequest) -> Reply:
        """Take a client back to the global model."""
        async with self._sessions.turn(request) as turn:
            adapter = await self._replies.adapter_of(request.client)  # first: nothing may fail after the reset
            await turn.request.admit()
            done = await turn.session.reset(turn.request, point=event("reset"))
            await self._restart_evidence(request.client, done)
            return Reply(orjson.dumps({"adapter": adapter}), done.seq, "reset", committed=True, replayed=done.replayed)

    async def delete(self, request: ClientRequest) -> None:
        """Remove a client and all that was learned for it; nothing happens when there is none."""
        async with self._sessions.turn(request) as turn:
            await turn.request.admit()
            await turn.session.delete()
            deleted = Doubt()
            deleted.learn("unknown")  # the client is gone by now, so nobody may say that nothing was changed
            with deleted:
                for forget in self._forgetting:
                    await forget(request.client)

    async def _configured(self, turn: Turn, client: ClientScope, wanted: Wanted) -> Reply:
        configuration, initial = wanted.configuration, None
        if configuration is not None:
            initial = await self._new_states.initial(configuration, turn.request.admit)
        head = await turn.session.known(turn.request)
        if isinstance(head, Applied):
            return await self._configured_before(client, head, wanted)
        if head is not None and self._has(head.config, configuration):
            if wanted.paused in (None, head.paused):
                if configuration is not None:
                    await self._replies.note_choice(client, head.config)
                answer = self._answer(head.config, paused=head.paused, changed=False)
                status = "restored" if head.has_state or head.base < head.seq else "reset"
                return Reply(answer, head.seq, status, committed=False)
        elif head is not None and configuration is not None:
            paused = head.paused if wanted.paused is None else wanted.paused
            try:
                applied = await turn.session.reset(
                    turn.request, configuration, wanted.paused, point=event("configured")
                )
            except ClientUnknown as unknown:
                if unknown.committed:
                    raise
            else:
                await self._restart_evidence(client, applied)
                answer = self._answer(configuration, paused=paused, changed=True)
                return Reply(answer, applied.seq, applied.status, committed=True, replayed=applied.replayed)

        async def change(present: Present[ClientState]) -> Change[ClientState]:
            config, state = present.config, present.state
            if initial is not None and not (present.seq and self._has(config, configuration)):
                config, state = initial.configuration, initial
            paused = present.paused if wanted.paused is None else wanted.paused
            befell = "configured" if config != present.config else "paused" if paused else "resumed"
            answer = self._answer(config, paused=paused, changed=True)
            return Change(config, state, answer, paused, chosen=configuration is not None, point=event(befell))

        applied = await turn.session.apply(turn.request, change)
        if head is None or not self._has(head.config, configuration):
            await self._restart_evidence(client, applied)
        return await self._replies.of(client, applied)

    async def _restart_evidence(self, client: ClientScope, applied: Applied) -> None:
        """Restart the evidence of a client that has another state now; its next labels would do so too."""
        if self._fleet is None or self._questions is None or applied.replayed != "none":
            return
        self._questions.tell(client, applied.life, applied.seq, ())
        with suppress(StateError):
            stored = await self._replies.describe(client)
            if stored is not None:
                await self._fleet.restart(client, stored.config, life=applied.life, seq=applied.seq)

    async def _configured_before(self, client: ClientScope, applied: Applied, wanted: Wanted) -> Reply:
        """What a repeated request is answered; of one that reset the client, what was asked for is said."""
        if applied.answer is not None:
            return await self._replies.of(client, applied)
        applied_before = Doubt()
        applied_before.learn("unknown")
        with applied_before:
            stored = await self._replies.describe(client)
        configuration = wanted.configuration or (stored.config if stored else "")
        paused = (stored is not None and stored.paused) if wanted.paused is None else wanted.paused
        answer = self._answer(configuration, paused=paused, changed=True)
        return Reply(answer, applied.seq, "reset", committed=True, replayed="stored")

    def _answer(self, configuration: str, *, paused: bool, changed: bool) -> bytes:
        described = self._configurations.describe(configuration)
        return orjson.dumps({**described, "adaptation": adaptation(paused), "changed": changed})

    def _has(self, stored: str, wanted: str | None) -> bool:
        """Whether a stored configuration is of the wanted adapter, however many defaults either spells out."""
        try:
            return wanted is None or self._configurations.adapter(stored) == self._configurations.adapter(wanted)
        except ConfigurationError:  # the stored one is of another version of the service
            return False


def adaptation(paused: bool) -> str:
    """How the interface says whether a client adapts."""
    return "paused" if paused else "running"


def _no_client(client: ClientScope) -> ClientUnknown:
    return ClientUnknown(f"there is no client {client.name!r}; it begins with its first batch")


def _describe(stored: Description, in_memory: bool, nbytes: int) -> Mapping[str, Any]:
    return {
        "version": stored.seq,
        "status": "reset" if stored.length == 0 and stored.base == stored.seq else "warm" if in_memory else "restored",
        "bytes": nbytes,
        "tier": "memory" if in_memory else "redis",
        "base": stored.base,
        "base_bytes": stored.length,
        "journal_entries": stored.journal_entries,
        "journal_bytes": stored.journal_bytes,
        "owner": stored.owner.partition("~")[0] or None,
        "expires_in_s": stored.ttl_ms // 1000,
        "kept": [{"version": each.seq, "at": rfc3339(each.at_ms / 1000), "bytes": each.length} for each in stored.kept],
    }
