"""Each safeguard of the protocol, taken away. A checker that does not notice proves nothing.

A mutation is a profile: edits of scripts, patches of the flow, and rates that make the fault it matters for frequent.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checker.faults import RATES
from checker.profile import Edit, Patch, Profile
from checker.toy import ToyState

from acclimate_service.state import (
    Appended,
    Applied,
    Attempt,
    Basis,
    Batch,
    Committed,
    Conflict,
    Fenced,
    Journal,
    Loaded,
    Replay,
    Request,
    Session,
    StateError,
    StateStore,
    random_rid,
    wire,
)
from acclimate_service.state.held import Held
from acclimate_service.state.replaying import Replays
from acclimate_service.state.snapshotting import Snapshotter
from acclimate_service.state.writing import Writer


def _raised(**rates: float) -> Mapping[str, float]:
    return {**RATES, **{name.replace("__", ": ").replace("_", " "): rate for name, rate in rates.items()}}


# cx 3, 4


class _Versioned(Request):
    """A request whose tags are version numbers."""

    def attempt(self) -> Attempt:
        return Attempt(self.rid, self.fingerprint, f"{_versions[self.rid]:016x}")


_versions: dict[str, int] = {}
_write = Writer.write


async def _write_versioned(self: Writer[ToyState], held: Held[ToyState], request: Request, batch: Batch) -> Any:
    _versions[request.rid] = held.seq + 1
    return await _write(self, held, _Versioned(request.rid, request.fingerprint, request.admit), batch)


# cx 6


async def _retry_as_new(session: Session[Any], request: Request, batch: Batch) -> Applied:
    try:
        return await session.apply(request, batch)
    except StateError as error:
        if error.committed is False:
            raise
        return await session.apply(Request(random_rid(), request.fingerprint), batch)


# cx 7


def _verdict_by_key(self: Loaded, fingerprint: str) -> Replay | None:
    return Replay(self.marker.seq, self.marker.model, self.answer, self.life) if self.marker else None


# cx 8

_append = Journal.append
_commit = StateStore.commit


async def _append_as_if(self: Journal, client: Any, model: str, basis: Basis, fence: str, attempt: Attempt, *rest: Any):
    outcome = await _append(self, client, model, basis, fence, attempt, *rest)
    if isinstance(outcome, Conflict | Fenced):
        return Appended(Basis(basis.life, basis.seq + 1, attempt.tag, basis.sid), touched=False)
    return outcome


async def _commit_as_if(
    self: StateStore, client: Any, model: str, basis: Basis, attempt: Attempt, *rest: Any, **more: Any
):
    outcome = await _commit(self, client, model, basis, attempt, *rest, **more)
    return Committed(Basis(basis.life, basis.seq + 1, attempt.tag)) if isinstance(outcome, Conflict) else outcome


# cx 11, 12

_take = Snapshotter._take


async def _take_mislabelled(self: Snapshotter[ToyState], held: Held[ToyState]) -> bool:
    now = await self._context.store.load(self._context.client, self._context.model)
    if now.life != held.life or now.head is None:
        return False
    return await _take(self, replace(held, seq=now.head.seq, tag=now.head.tag))


async def _take_unsettled(self: Snapshotter[ToyState], held: Held[ToyState]) -> bool:
    owed, held.track.owed = held.track.owed, {}
    try:
        return await _take(self, held)
    finally:
        held.track.owed = owed


# cx 13

_settle = Replays.settle


async def _recompute_unstored(self: Replays[ToyState], request: Request, replay: Replay, head: Any) -> Applied | None:
    rebuilt = await self._rebuilder.rebuild(head, replay.seq)
    if rebuilt is None:
        return None
    return Applied(replay.seq, replay.life, replay.model, rebuilt.owed[replay.seq].answer, "recomputed")


async def _settle_other_model(self: Replays[ToyState], request: Request, loaded: Loaded, replay: Replay) -> Any:
    if replay.answer is None and replay.model != self._context.model:
        return Applied(replay.seq, replay.life, replay.model, None, "unavailable")
    return await _settle(self, request, loaded, replay)


_MARKER_CHECKS = """  if life ~= registry.life then return {'USED'} end
  if fp ~= ask.fp then return {'MISMATCH'} end
  return {'REPLAY', seq, model, redis.call('HGET', keys.answers, ask.rid), life}
"""
_MARKER = "  redis.call('HSET', keys.markers, ask.rid, table.concat({ask.fp, model, seq, ask.tag, life}, '|'))\n"
_FP_CHECK = "  if fp ~= ask.fp then return {'MISMATCH'} end\n"
_FLIP_CHECKS = (
    Edit("flip", "if registry_at(keys.registry).life ~= life then return {'GONE'} end\n"),
    Edit("flip", "if holder ~= fence then return {'FENCED'} end\n"),
    Edit("flip", "if (at == seq and tag or string.match(meta_at(at), '^(.-)|')) ~= tag_at then return {'STALE'} end\n"),
)
_SNAPSHOTS: Any = {
    "affinity": 0.9,
    "failing_snapshots": 0.0,
    "unequal": 0.0,
    "resets": 0.0,
    "size": "large",
    "limits": {"snapshot_entries": 2},
}
_FAILING: Any = {
    "failing_steps": 0.25,
    "duplicates": 8.0,
    "deletes": 0.0,
    "resets": 0.0,
    "unequal": 0.0,
    "size": "large",
    "limits": {"lease_ms": 10, "steal_after_ms": 200},
    "rates": _raised(undo__pause_before=0.6),
}

MUTATIONS: Mapping[str, Profile] = {
    "1 tag compare in commit": Profile(edits=(Edit("commit", "(tag or '') ~= basis_tag or "),)),
    "2 tag compare in append": Profile(
        edits=(Edit("append", "if tag ~= basis_tag then return conflict(registry, keys.head) end\n"),),
        unequal=1.0,
    ),
    "3 versions for tags": Profile(patches=(Patch(Writer, "write", _write_versioned),), deletes=3.0),
    "5 marker check in the scripts": Profile(
        edits=(Edit("commit", _MARKER_CHECKS, "return nil\n"), Edit("append", _MARKER_CHECKS, "return nil\n")),
    ),
    "5 marker": Profile(
        edits=(
            Edit("commit", _MARKER),
            Edit("append", _MARKER),
        ),
    ),
    "6 key of a retry": Profile(apply=_retry_as_new),
    "7 fingerprint compare": Profile(
        edits=(Edit("commit", _FP_CHECK), Edit("append", _FP_CHECK), Edit("reset", _FP_CHECK)),
        patches=(Patch(Loaded, "verdict", _verdict_by_key),),
    ),
    "7 fingerprint compare on load": Profile(patches=(Patch(Loaded, "verdict", _verdict_by_key),)),
    "8 discard of a refused result": Profile(
        patches=(Patch(Journal, "append", _append_as_if), Patch(StateStore, "commit", _commit_as_if)),
    ),
    "9 fence, tag and life in flip": Profile(
        edits=_FLIP_CHECKS,
        rates=_raised(flip__delayed=0.6, flip__pause_before=0.3),
        failing_snapshots=0.0,
        deletes=5.0,
        size="large",
        limits={"snapshot_entries": 2},
    ),
    "9 range in flip too": Profile(
        edits=(*_FLIP_CHECKS, Edit("flip", "at <= base or at > seq or snap ~= old_sid", "snap ~= old_sid")),
        rates=_raised(flip__delayed=0.3, flip__pause_before=0.2),
        size="large",
    ),
    "10 marker in reset": Profile(
        edits=(
            Edit(
                "reset",
                "refuse_attempt(registry, ask, keys)\nif refusal",
                "refuse_life(registry, ask.life, keys.head)\nif refusal",
            ),
        ),
        resets=4.0,
    ),
    "11 label of a snapshot": Profile(
        patches=(Patch(Snapshotter, "_take", _take_mislabelled),),
        **_SNAPSHOTS,
        rates=_raised(load__slow=0.3, answer__slow=0.3),
    ),
    "12 answers before flip": Profile(
        patches=(Patch(Snapshotter, "_take", _take_unsettled),),
        **_SNAPSHOTS,
        rates=_raised(answer__drop=0.5),
    ),
    "13 recomputed answer stored": Profile(patches=(Patch(Replays, "_recompute", _recompute_unstored),), **_FAILING),
    "13 answer check in undo": Profile(
        edits=(Edit("undo", "if redis.call('HEXISTS', keys.answers, rid) == 1 then return {'ANSWERED'} end\n"),),
        **_FAILING,
    ),
    "13 other model": Profile(
        patches=(Patch(Replays, "settle", _settle_other_model),),
        **_FAILING,
        second_model=1.0,
        switches=0.7,
    ),
    "17 key_min": Profile(edits=tuple(Edit(name, "age <= key_min or not", "not") for name in ("commit", "append"))),
    "18 chunk count": Profile(
        edits=tuple(
            Edit(name, "redis.call('HLEN', keys.snapshot) ~= tonumber(chunks)", "false") for name in ("flip", "commit")
        ),
        limits={"upload_ttl_ms": 25},
        rates=_raised(chunk__pause_before=0.25, flip__pause_before=0.25),
        failing_snapshots=0.0,
        size="large",
    ),
    "19 live sid in chunk": Profile(
        edits=(Edit("chunk", "if redis.call('HGET', head_key, 'snap') == sid then return {'OK'} end\n"),),
        rates=_raised(chunk__delayed=0.2),
        size="large",
    ),
    "20 TTL in chunk": Profile(
        edits=(Edit("chunk", "redis.call('PEXPIRE', snapshot_key, upload_ttl)\n"),), size="large"
    ),
    "20 snapshot id in delete": Profile(
        edits=(Edit("delete", "if registry['m:' .. ARGV[i]] ~= ARGV[i + 1] then return {'CONFLICT'} end"),),
        rates=_raised(delete__pause_before=0.6),
        deletes=5.0,
        size="large",
        unequal=1.0,
    ),
    "21 journal cap": Profile(
        edits=(
            Edit("append", "if entries + 1 > entries_cap or bytes + #entry > bytes_cap then return {'JFULL'} end\n"),
        ),
        failing_snapshots=1.0,
        resets=0.0,
        deletes=0.0,
        unequal=0.0,
        size="large",
    ),
}


# Caught by directed scenarios only: the histories that need them are too rare.

VERSIONS = MUTATIONS["3 versions for tags"]
RULE_T = Profile(edits=(Edit("load", "redis.call('HGET', keys.head, 'snap') == sid and "),))
LIFE = Profile(
    edits=(Edit("commit", "local refusal = refuse_life(registry, ask.life, keys.head)\n", "local refusal\n"),)
)
S2 = Profile(patches=(Patch(wire, "_effect", lambda unsettled: False),))
