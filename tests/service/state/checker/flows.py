"""Flows of a session as they would be without a safeguard."""

from dataclasses import replace
from typing import Any

from checker.toy import ToyState

from acclimate_service.guard.fleet import Heard
from acclimate_service.guard.pools import Share
from acclimate_service.state import Applied, Batch, Request, Session, StateError, StateStore, random_rid
from acclimate_service.state.entries import Entries
from acclimate_service.state.held import Held, Snapshotter, Track
from acclimate_service.state.journal import Appended, Fenced, Journal
from acclimate_service.state.outcomes import Attempt, Committed, Conflict, Loaded, Repeat
from acclimate_service.state.records import Basis
from acclimate_service.state.repeats import Repeats
from acclimate_service.state.replay import Replay
from acclimate_service.state.writer import Writer

# cx 3, 4


_write = Writer.write


async def write_versioned(self: Writer[ToyState], held: Held[ToyState], attempt: Attempt, *rest: Any) -> Any:
    return await _write(self, held, replace(attempt, tag=f"{held.seq + 1:016x}"), *rest)


# cx 6


async def retry_as_new(session: Session[Any], request: Request, batch: Batch) -> Applied:
    try:
        return await session.apply(request, batch, while_paused=False)
    except StateError as error:
        if error.committed is False:
            raise
        return await session.apply(Request(random_rid(), request.fingerprint), batch, while_paused=False)


# cx 7


def verdict_by_key(self: Loaded, fingerprint: str) -> Repeat | None:
    return Repeat(self.marker.seq, self.marker.model, self.answer, self.life) if self.marker else None


# cx 8

_append = Journal.append
_commit = StateStore.commit


async def append_as_if(self: Journal, client: Any, model: str, basis: Basis, fence: str, attempt: Attempt, *rest: Any):
    outcome = await _append(self, client, model, basis, fence, attempt, *rest)
    if isinstance(outcome, Conflict | Fenced):
        return Appended(Basis(basis.life, basis.seq + 1, attempt.tag, basis.sid), touched=False)
    return outcome


async def commit_as_if(
    self: StateStore, client: Any, model: str, basis: Basis, attempt: Attempt, *rest: Any, **more: Any
):
    outcome = await _commit(self, client, model, basis, attempt, *rest, **more)
    return Committed(Basis(basis.life, basis.seq + 1, attempt.tag)) if isinstance(outcome, Conflict) else outcome


# cx 11, 12

_take = Snapshotter._take


async def take_mislabelled(self: Snapshotter[ToyState], held: Held[ToyState], awaited: bool) -> int:
    now = await self._context.store.load(self._context.client, self._context.model)
    if now.life != held.life or now.head is None:
        return 0
    return await _take(self, replace(held, seq=now.head.seq, tag=now.head.tag), awaited)


async def take_unsettled(self: Snapshotter[ToyState], held: Held[ToyState], awaited: bool) -> int:
    owed, held.track.owed = held.track.owed, {}
    try:
        return await _take(self, held, awaited)
    finally:
        held.track.owed = owed


_whole = Writer._commit


async def commit_unsettled(self: Writer[ToyState], held: Held[ToyState], *rest: Any, **more: Any) -> Any:
    owed, held.track.owed = held.track.owed, {}
    try:
        return await _whole(self, held, *rest, **more)
    finally:
        held.track.owed = owed


# What a replay begins from, and reads


def resumed_by_version(self: Replay[ToyState], listed: Any) -> Held[ToyState] | None:
    held, head = self.held, self._head
    if held is None or not head.base <= held.seq <= self._until:
        return None
    sizes = {each.seq: each.size for each in listed if each.seq <= held.seq}
    owed = {seq: owed for seq, owed in held.track.owed.items() if seq in sizes}
    return replace(held, life=self._life, track=Track(head.base, head.sid, self._fence, sizes, owed))


async def of_any_history(self: Replay[ToyState], listed: Any) -> bool:
    return True


_fetch = Entries.fetch


async def fetch_any(self: Entries, client: Any, model: str, listed: Any) -> Any:
    head = (await StateStore(self._wire, self._limits).load(client, model)).head
    now = await self.contents(client, head, max(each.seq for each in listed)) if head else None
    seqs = {each.seq for each in listed}
    return await _fetch(self, client, model, [each for each in now if each.seq in seqs]) if now else None


# cx 13

_settle = Repeats.settle


async def recompute_unstored(
    self: Repeats[ToyState], request: Request, loaded: Loaded, repeat: Repeat, head: Any
) -> Applied | None:
    owed = await self._reader.answer(loaded, head, request.rid, repeat.seq)
    return Applied(repeat.seq, repeat.life, repeat.model, owed.answer, "recomputed") if owed else None


async def settle_other_model(self: Repeats[ToyState], request: Request, loaded: Loaded, repeat: Repeat) -> Any:
    if repeat.answer is None and repeat.model != self._context.model:
        return Applied(repeat.seq, repeat.life, repeat.model, None, "unavailable")
    return await _settle(self, request, loaded, repeat)


# Evidence


async def tell_and_leave(self: Heard[Any], client: Any, configuration: str, **told: Any) -> None:
    known = await self._pools.share(client, configuration)
    if await self._pools.life(client) == told["life"]:
        share = Share(told["life"], told["seq"], told["born"], told["counts"])
        await self._pools.tell(client, configuration, share, known.life if known else "")


async def tell_over_a_later_life(self: Heard[Any], client: Any, configuration: str, **told: Any) -> None:
    if await self._pools.life(client) == told["life"]:
        await tell_unasked(self, client, configuration, **told)


async def tell_unasked(self: Heard[Any], client: Any, configuration: str, **told: Any) -> None:
    share = Share(told["life"], told["seq"], told["born"], told["counts"])
    known = await self._pools.share(client, configuration)
    await self._pools.tell(client, configuration, share, known.life if known else "")
    if await self._pools.life(client) != share.life:
        await self._pools.forget(client, share.life)
