"""What lies in the journals of clients: listed first, then read piece by piece."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from acclimate_service.state.errors import StateCorrupt
from acclimate_service.state.limits import Limits
from acclimate_service.state.records import Head
from acclimate_service.state.redis.keys import ClientScope
from acclimate_service.state.redis.wire import Wire


@dataclass(frozen=True, slots=True)
class Listed:
    """What an entry of the journal is: version, tag, request id, bytes."""

    seq: int
    tag: str
    rid: str
    size: int


@dataclass(frozen=True, slots=True)
class Written:
    """One entry as it lies in the journal: version, tag, request id, bytes."""

    seq: int
    tag: str
    rid: str
    blob: bytes = field(repr=False)


class Entries:
    """Reads the entries of journals; what moves meanwhile is found to have moved.

    Args:
        wire: exchanges with Redis.
        limits: how much is read at a time.
    """

    def __init__(self, wire: Wire, limits: Limits) -> None:
        self._wire = wire
        self._limits = limits

    async def contents(self, client: ClientScope, head: Head, until: int) -> list[Listed] | None:
        """What the entries after `head.base` up to version `until` are; None: one is not there."""
        seqs = range(head.base + 1, until + 1)
        if not seqs:
            return []
        metas: list[bytes | None] = await self._wire.read(
            "HMGET", client.journal(head.model), *(f"{seq}m" for seq in seqs)
        )
        listed = [_listed(seq, meta) for seq, meta in zip(seqs, metas, strict=True) if meta is not None]
        return listed if len(listed) == len(seqs) else None

    def pieces(self, listed: Sequence[Listed]) -> list[list[Listed]]:
        """Neighbouring entries that take at most what is read at a time together, or a single larger one."""
        limit, room, pieces = self._limits.read_chunks * self._limits.chunk_bytes, 0, list[list[Listed]]()
        for each in listed:
            if not pieces or each.size > room:
                pieces.append([])
                room = limit
            pieces[-1].append(each)
            room -= each.size
        return pieces

    async def fetch(self, client: ClientScope, model: str, listed: Sequence[Listed]) -> list[Written] | None:
        """Read entries; None: one is not there any more."""
        fields = [field for each in listed for field in (str(each.seq), f"{each.seq}m")]
        found: list[bytes | None] = await self._wire.read("HMGET", client.journal(model), *fields)
        written = []
        for each, blob, meta in zip(listed, found[::2], found[1::2], strict=True):
            if blob is None or meta is None or _listed(each.seq, meta) != each:  # taken back, perhaps replaced
                return None
            if each.size != len(blob):
                raise StateCorrupt(f"journal entry {each.seq} has {len(blob)} bytes; {each.size} were written")
            written.append(Written(each.seq, each.tag, each.rid, blob))
        return written


def _listed(seq: int, meta: bytes) -> Listed:
    tag, rid, size = meta.decode().split("|")
    return Listed(seq, tag, rid, int(size))
