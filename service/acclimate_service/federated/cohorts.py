"""What the clients of one model learn together, in Redis: layers by version, and who takes part.

Every key of a cohort starts with `acc:{<tenant>/~<model>}:`, which is no client's hash tag. A version is complete or
not there: its layers are uploaded under a new id, then a pointer is flipped, compare-and-set on a random tag. The lease
only saves work.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from acclimate_service.state import (
    Argument,
    Contended,
    Limits,
    Snapshot,
    StateCorrupt,
    Wire,
    check_model,
    hashing,
    new_id,
)
from acclimate_service.state.redis.scripts import (
    COHORT_CHUNK,
    COHORT_FLIP,
    COHORT_FORGET,
    COHORT_LEASE,
    COHORT_NOTE,
    COHORT_SETTLE,
    RELEASE,
)

INDEX_CAP: Final = 1024
"""Clients in the index of active ones."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Stored layers: where they are, their bytes and their SHA-256 (64 hex digits)."""

    snapshot: Snapshot
    length: int
    digest: str


@dataclass(frozen=True, slots=True)
class Cohort:
    """The newest version.

    Args:
        version: +1 per round; 0 before the first.
        tag: random id of the last round, empty before the first; the compare-and-set compares it.
        layers: of this version; None before the first.
        previous: of the version before; None before the second, and once all have finished.
        unfinished: clients that took part in the last round, until all of them have finished it.
        age_ms: time since the last round; None before the first.
    """

    version: int = 0
    tag: str = ""
    layers: Layers | None = None
    previous: Layers | None = None
    unfinished: tuple[str, ...] = ()
    age_ms: float | None = None


class Cohorts:
    """The cohort of one model and tenant.

    All methods raise StateError where Redis fails.

    Args:
        wire: exchanges with Redis; whoever made it closes it.
        limits: sizes and lifetimes.
        model: content hash of the frozen model.
        tenant: whose clients.
    """

    def __init__(self, wire: Wire, limits: Limits, model: str, tenant: str) -> None:
        self._wire = wire
        self._limits = limits
        self._prefix = f"acc:{{{tenant}/~{check_model(model)}}}:"

    @property
    def renew_s(self) -> float:
        """Seconds after which a lease is to be renewed."""
        return self._limits.lease_ms / 3000

    async def note(self, client: str) -> None:
        """Remember that a client is active now."""
        args = (client, INDEX_CAP, self._limits.state_ttl_ms)
        await self._wire.run(COHORT_NOTE, (self._key("m"),), args)

    async def forget(self, client: str) -> None:
        """Remember no longer that a client was active."""
        await self._wire.run(COHORT_FORGET, (self._key("m"),), (client,))

    async def active(self) -> tuple[str, ...]:
        """Clients by the time they were last active, the last one first; none whose state has expired since."""
        seconds, _ = await self._wire.read("TIME")
        oldest = int(seconds) * 1000 - self._limits.state_ttl_ms
        command = ("ZREVRANGEBYSCORE", self._key("m"), "+inf", oldest, "LIMIT", 0, INDEX_CAP)
        found: list[bytes] = await self._wire.read(*command)
        return tuple(client.decode() for client in found)

    async def lease(self, holder: str) -> int | None:
        """Take or renew the lease of the round; None, or the milliseconds that somebody else still has it."""
        status, *rest = (await self._wire.run(COHORT_LEASE, (self._key("l"),), (holder, self._limits.lease_ms))).rows
        return None if status == b"OK" else int(rest[0])

    async def release(self, holder: str) -> None:
        """Give the lease back, if it is still this holder's."""
        await self._wire.run(RELEASE, (self._key("l"),), (holder,))

    async def load(self) -> Cohort:
        """The newest version.

        Raises:
            StateCorrupt: it cannot be read.
        """
        flat: list[bytes] = await self._wire.read("HGETALL", self._key("c"))
        if not flat:
            return Cohort()
        seconds, microseconds = await self._wire.read("TIME")
        now_ms = int(seconds) * 1000 + int(microseconds) / 1000
        return _cohort({k.decode(): v.decode() for k, v in zip(flat[::2], flat[1::2], strict=True)}, now_ms)

    async def read(self, layers: Layers) -> bytes:
        """Read and verify stored layers.

        Raises:
            Contended: they are there no longer: another round came between.
            StateCorrupt: they are not what was written.
        """
        chunks: list[bytes] = []
        for start in range(0, layers.snapshot.chunks, self._limits.read_chunks):
            numbers = range(start, min(start + self._limits.read_chunks, layers.snapshot.chunks))
            found: list[bytes | None] = await self._wire.read("HMGET", self._at(layers), *numbers)
            chunks += [chunk for chunk in found if chunk is not None]
        data = b"".join(chunks)
        if len(chunks) < layers.snapshot.chunks:
            raise Contended("the cohort's layers were replaced while they were read")
        if await hashing(lambda: hashlib.sha256(data).hexdigest(), len(data)) != layers.digest:
            raise StateCorrupt("the cohort's layers do not match their checksum")
        return data

    async def advance(self, cohort: Cohort, data: bytes, participants: Sequence[str]) -> Cohort:
        """Make these layers the next version after `cohort`.

        Raises:
            Contended: another round came first; nothing was changed.
        """
        layers = await self._upload(data)
        tag = new_id()
        keys = (self._key("c"), self._at(cohort.previous), self._at(cohort.layers), self._at(layers))
        basis_sid = cohort.layers.snapshot.sid if cohort.layers else ""
        args: tuple[Argument, ...] = (
            cohort.tag,
            tag,
            basis_sid,
            layers.snapshot.sid,
            layers.snapshot.chunks,
            layers.length,
            layers.digest,
            orjson.dumps(list(participants)),
            self._limits.state_ttl_ms,
        )
        reply = await self._wire.run(COHORT_FLIP, keys, args)
        if reply.rows[0] != b"OK":
            raise Contended("another round of this cohort came first", "unknown" if reply.unsettled else False)
        return Cohort(int(reply.rows[1]), tag, layers, cohort.layers, tuple(participants), 0)

    async def settle(self, cohort: Cohort) -> None:
        """All participants have finished; nothing happens if another round came since."""
        await self._wire.run(COHORT_SETTLE, (self._key("c"), self._at(cohort.previous)), (cohort.tag,))

    async def _upload(self, data: bytes) -> Layers:
        size = self._limits.chunk_bytes
        chunks = [data[start : start + size] for start in range(0, len(data), size)]
        digest = await hashing(lambda: hashlib.sha256(data).hexdigest(), len(data))
        layers = Layers(Snapshot(new_id(), len(chunks)), len(data), digest)
        for index, chunk in enumerate(chunks):
            args = (layers.snapshot.sid, index, chunk, self._limits.upload_ttl_ms)
            await self._wire.run(COHORT_CHUNK, (self._key("c"), self._at(layers)), args)
        return layers

    def _key(self, suffix: str) -> str:
        return f"{self._prefix}{suffix}"

    def _at(self, layers: Layers | None) -> str:
        return self._key(f"s:{layers.snapshot.sid if layers else '-'}")


def _cohort(fields: dict[str, str], now_ms: float) -> Cohort:
    try:
        if fields["v"] != "1":
            raise StateCorrupt(f"the stored cohort has format {fields['v']!r}; this version reads format 1")
        return Cohort(
            version=int(fields["version"]),
            tag=fields["tag"],
            layers=_layers(fields, ""),
            previous=_layers(fields, "p"),
            unfinished=tuple(orjson.loads(fields["unfinished"] or "[]")),
            age_ms=max(0.0, now_ms - int(fields["at"])),  # which is rounded, perhaps upwards
        )
    except (KeyError, ValueError) as error:
        raise StateCorrupt(f"the stored cohort cannot be read: {error!r}") from error


def _layers(fields: dict[str, str], prefix: str) -> Layers | None:
    sid, n, length, digest = (fields[prefix + name] for name in ("snap", "n", "len", "sum"))
    return Layers(Snapshot(sid, int(n)), int(length), digest) if sid else None
