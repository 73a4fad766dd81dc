"""Turns the replies of the scripts into records."""

from dataclasses import replace
from typing import Any

from acclimate_service.state.errors import StateCorrupt
from acclimate_service.state.records import (
    Absent,
    Attempt,
    Basis,
    CommitOutcome,
    Committed,
    Conflict,
    Gone,
    Head,
    Incomplete,
    Lease,
    Loaded,
    Marker,
    Mismatch,
    Refused,
    Replay,
    ResetOutcome,
    Snapshot,
    Used,
)
from acclimate_service.state.redis.wire import Reply


def loaded(reply: Reply) -> Loaded:
    """The reply of `load`.

    Raises:
        StateCorrupt: the stored head or marker cannot be read.
    """
    _, life, gone, origin, marker, answer, head, touched, fence, lease_ms = reply.rows
    return Loaded(
        life=life.decode(),
        gone=gone == b"1",
        origin=origin.decode(),
        marker=_marker(marker),
        answer=answer or None,
        head=head_of(head),
        touched=touched == b"1",
        lease=Lease(fence.decode(), lease_ms) if fence else None,
    )


def commit_outcome(reply: Reply, attempt: Attempt, sid: str) -> CommitOutcome:
    """The reply of `commit`, sent with this attempt and the id of its snapshot."""
    if reply.rows[0] == b"INCOMPLETE":
        return Incomplete(reply.effect)
    return change_outcome(reply.rows, attempt, sid)


def reset_outcome(reply: Reply, attempt: Attempt) -> ResetOutcome:
    """The reply of `reset`, sent with this attempt. It compares no tag, so a later state may suit an earlier copy."""
    if reply.rows[0] == b"ABSENT":
        return Absent(reply.effect)
    outcome = change_outcome(reply.rows, attempt, "")
    return replace(outcome, committed=reply.effect) if isinstance(outcome, Conflict) else outcome


def chunk_refusal(reply: Reply) -> Conflict | Gone | None:
    """The reply of `chunk`; None: accepted."""
    match reply.rows:
        case [b"OK"]:
            return None
        case [b"CONFLICT", life, head]:
            return Conflict(life.decode(), head_of(head))
        case _:
            return Gone()


def change_outcome(rows: list[Any], attempt: Attempt, sid: str) -> Committed | Conflict | Refused:
    """What the scripts that carry a marker have in common."""
    match rows:
        case [b"OK", seq, life, duplicate]:
            return Committed(Basis(life.decode(), int(seq), attempt.tag, sid), duplicate == b"1")
        case [b"CONFLICT", life, head]:
            return Conflict(life.decode(), head_of(head))
        case [b"REPLAY", seq, model, answer, life]:
            return Replay(int(seq), model.decode(), answer or None, life.decode())
        case [b"MISMATCH"]:
            return Mismatch()
        case [b"USED"]:
            return Used()
        case [b"GONE"]:
            return Gone()
        case _:
            raise StateCorrupt(f"a script answered {rows!r}, which this version does not know", "unknown")


def _marker(text: bytes | None) -> Marker | None:
    if text is None:
        return None
    try:
        fingerprint, model, seq, tag, life = text.decode().split("|")
        return Marker(fingerprint, model, int(seq), tag, life)
    except ValueError as error:
        raise StateCorrupt("a stored idempotency marker cannot be read") from error


def head_of(flat: list[bytes]) -> Head | None:
    """The fields of a head, as Redis lists them; None: there is none.

    Raises:
        StateCorrupt: they cannot be read.
    """
    if not flat:
        return None
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    try:
        return _parse(fields)
    except (KeyError, ValueError) as error:
        raise StateCorrupt(f"the stored head cannot be read: {error!r}") from error


def _parse(fields: dict[bytes, bytes]) -> Head:
    if fields[b"v"] != b"1":
        raise StateCorrupt(f"the stored head has format {fields[b'v']!r}; this version reads format 1")
    sid, chunks = fields[b"snap"].decode(), int(fields[b"n"])
    return Head(
        model=fields[b"model"].decode(),
        seq=int(fields[b"seq"]),
        tag=fields[b"tag"].decode(),
        base=int(fields[b"base"]),
        inline=fields[b"st"],
        snapshot=Snapshot(sid, chunks) if sid else None,
        length=int(fields[b"len"]),
        digest=fields[b"sum"].decode(),
        config=fields[b"cfg"].decode(),
        fence=fields[b"fence"].decode(),
        journal_entries=int(fields[b"jn"]),
        journal_bytes=int(fields[b"jb"]),
        number=int(fields.get(b"num", b"0")),
    )
