"""States too large for their head: they are stored in chunks."""

import asyncio

from acclimate_service.state.limits import Limits
from acclimate_service.state.outcomes import Conflict, Gone, Reply
from acclimate_service.state.records import Snapshot, head_of
from acclimate_service.state.redis.keys import ClientScope, new_id
from acclimate_service.state.redis.scripts import CHUNK
from acclimate_service.state.redis.wire import Wire


class Chunks:
    """Writes and reads the chunks of snapshots, one after the other, so that neighbours on the same Redis get through.

    Args:
        wire: exchanges with Redis.
        limits: sizes and lifetimes.
    """

    def __init__(self, wire: Wire, limits: Limits) -> None:
        self._wire = wire
        self._limits = limits

    async def upload(
        self, client: ClientScope, model: str, life: str, blob: bytes, gap_ms: int = 0
    ) -> Snapshot | Conflict | Gone:
        """Write a blob under a new id, which the client's registry names. It expires within `upload_ttl_ms`, unless it
        becomes the live snapshot.

        Args:
            client: whose state.
            model: model scope.
            life: the life of the client that the state belongs to.
            blob: the sealed state.
            gap_ms: pause between two chunks, in which a busy Redis serves others (ms).
        """
        size = self._limits.chunk_bytes
        snapshot = Snapshot(new_id(), -(-len(blob) // size))
        keys = (client.registry, client.head(model), client.snapshot(model, snapshot.sid))
        for index in range(snapshot.chunks):
            if index and gap_ms:
                await asyncio.sleep(gap_ms / 1000)
            chunk = blob[index * size : (index + 1) * size]  # one at a time: all at once would hold up the event loop
            args = (life, snapshot.sid, index, chunk, self._limits.upload_ttl_ms, model)
            refusal = _refusal(await self._wire.run(CHUNK, keys, args))
            if refusal is not None:
                return refusal
        return snapshot

    async def fetch(self, key: str, number: int) -> list[bytes] | None:
        """Read so many chunks; None: at least one is not there."""
        chunks: list[bytes] = []
        for start in range(0, number, self._limits.read_chunks):
            stop = min(start + self._limits.read_chunks, number)
            found: list[bytes | None] = await self._wire.read("HMGET", key, *range(start, stop))
            present = [chunk for chunk in found if chunk is not None]
            if len(present) < len(found):
                return None
            chunks += present
        return chunks


def _refusal(reply: Reply) -> Conflict | Gone | None:
    """The reply of `chunk`; None: accepted."""
    match reply.rows:
        case [b"OK"]:
            return None
        case [b"CONFLICT", life, head]:
            return Conflict(life.decode(), head_of(head))
        case _:
            return Gone()
