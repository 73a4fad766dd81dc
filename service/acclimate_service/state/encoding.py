"""What is stored, as bytes: the envelope around a state, and the entry that keeps a batch in a journal.

Either says whose it is, and proves that its bytes are the ones that were written. Numbers are big-endian.

The envelope of a state: magic `ACCS`, format (1), client digest (16 bytes), model hash (8), version (8), length of the
state (8), length of the adapter name (1), the name, the state. Its SHA-256 lies beside it.

An entry, which a journal keeps until a snapshot covers it: magic `ACCJ`, format (1), CRC-32 of all that follows (4);
version (8), batches skipped before it (8), client digest (16), lengths of engine, dtype (1 each), parameters (4) and
data (8), number of dimensions (1); then engine, dtype, dimensions (4 each), parameters, data.

A point of a timeline is text: version, time, the replica before if it was another one, and JSON, between bars.
"""

import asyncio
import hashlib
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import pairwise
from typing import Any, Final, TypeAlias, TypeVar

import orjson

from acclimate_service.state.errors import StateCorrupt
from acclimate_service.state.records import Restored
from acclimate_service.state.redis.keys import ClientScope

T = TypeVar("T")
_STATE_HEADER: Final = struct.Struct(">4sB16s8sQQB")
_STATE_MAGIC: Final = b"ACCS"
_STATE_FORMAT: Final = 1
_LONGEST_NAME: Final = 255
_ENTRY_PREFIX: Final = struct.Struct(">4sBI")
_ENTRY_HEADER: Final = struct.Struct(">QQ16sBBIQB")
_ENTRY_MAGIC: Final = b"ACCJ"
_ENTRY_FORMAT: Final = 2
ITEM_BYTES: Final = {"uint8": 1, "float16": 2, "float32": 4}
"""Bytes per element of the accepted dtypes; elements are little-endian."""
_ON_LOOP: Final = 256 * 1024
"""Bytes hashed in well below a millisecond; more would stall the event loop."""
_DIGITS: Final = ".4g"
"""How precisely a point of a timeline is kept."""
Measured: TypeAlias = float | Sequence[float] | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Sealed:
    """An enveloped state and its SHA-256 (64 hex digits)."""

    blob: bytes
    digest: str


def seal(client: ClientScope, model: str, adapter: str, seq: int, state: bytes) -> Sealed:
    """Put a state into its envelope.

    Args:
        client: whose state it is.
        model: content hash of the frozen model (16 hex digits).
        adapter: name of the adapter that made it, at most 255 bytes of UTF-8.
        seq: the version it will be committed as.
        state: the bytes of `State.to_bytes()`.

    Raises:
        ValueError: an adapter name that is too long.
    """
    name = adapter.encode()
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"the adapter name takes {len(name)} bytes; accepted are at most {_LONGEST_NAME}")
    header = _STATE_HEADER.pack(
        _STATE_MAGIC, _STATE_FORMAT, client.digest, bytes.fromhex(model), seq, len(state), len(name)
    )
    blob = b"".join((header, name, state))
    return Sealed(blob, hashlib.sha256(blob).hexdigest())


def unseal(sealed: Sealed, client: ClientScope, model: str, seq: int) -> Restored:
    """Verify an envelope against what its head says, and take the state out.

    Raises:
        StateCorrupt: a wrong digest, length, format, client, model or version.
    """
    return unseal_pieces((sealed.blob,), sealed.digest, client, model, seq)


def unseal_pieces(pieces: Sequence[bytes], digest: str, client: ClientScope, model: str, seq: int) -> Restored:
    """Verify an envelope that was cut up, and put the state together.

    Raises:
        StateCorrupt: a wrong digest, length, format, client, model or version.
    """
    if _checksum(pieces) != digest:
        raise StateCorrupt("the stored state does not match its checksum")
    opening, total = _opening(pieces), sum(map(len, pieces))
    if total < _STATE_HEADER.size:
        raise StateCorrupt(f"the stored state is cut off after {total} bytes, inside its envelope")
    magic, layout, owner, model_hash, written_seq, length, name_length = _STATE_HEADER.unpack_from(opening)
    found = (magic, layout, owner, model_hash, written_seq)
    if found != (_STATE_MAGIC, _STATE_FORMAT, client.digest, bytes.fromhex(model), seq):
        raise StateCorrupt("the stored state belongs to another client, model or version, or has an unknown format")
    start = _STATE_HEADER.size + name_length
    if total != start + length:
        raise StateCorrupt(f"the stored state is {total - start} bytes long, its envelope says {length}")
    return Restored(opening[_STATE_HEADER.size : start].decode(), seq, _joined(pieces, start))


async def hashing(work: Callable[[], T], size: int) -> T:
    """Run `seal` or `unseal` on `size` bytes: off the event loop where it takes long."""
    return work() if size <= _ON_LOOP else await asyncio.to_thread(work)


def _checksum(pieces: Sequence[bytes]) -> str:
    checksum = hashlib.sha256()
    for piece in pieces:
        checksum.update(piece)
    return checksum.hexdigest()


def _opening(pieces: Sequence[bytes]) -> bytes:
    """As much of the beginning as the header and the name may take."""
    opening = b""
    for piece in pieces:
        opening += piece[: _STATE_HEADER.size + _LONGEST_NAME - len(opening)]
    return opening


def _joined(pieces: Sequence[bytes], start: int) -> bytes:
    """All bytes from `start` on, copied piece by piece: in one go, no other thread had its turn before the last."""
    joined = BytesIO()
    for piece in pieces:
        joined.write(memoryview(piece)[start:])
        start = max(0, start - len(piece))
    return joined.getvalue()


@dataclass(frozen=True, slots=True)
class Batch:
    """The whole input of a step: images as they are before normalisation, and parameters that decide its result.

    Args:
        dtype: of the images, a key of `ITEM_BYTES`: the smallest one that holds them without loss.
        shape: of the images, e.g. [B, C, H, W].
        data: the images, C-contiguous, little-endian.
        parameters: what else decides the step or its answer, in the service's own encoding.
        skipped: how many numbered batches of the client are missing before it; the session fills it in.

    Raises:
        ValueError: an unknown dtype, or data of another length than the shape says.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview = field(repr=False)
    parameters: bytes = b""
    skipped: int = 0
    nbytes: int = field(init=False, repr=False, compare=False)
    """What it weighs in the journal, but for the header."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}; accepted are {', '.join(ITEM_BYTES)}")
        expected, nbytes = math.prod(self.shape) * ITEM_BYTES[self.dtype], memoryview(self.data).nbytes
        if nbytes != expected:
            raise ValueError(f"the data take {nbytes} bytes; their shape says {expected}")
        object.__setattr__(self, "nbytes", nbytes + len(self.parameters))


@dataclass(frozen=True, slots=True)
class Entry:
    """One journal entry: the version it leads to, its batch, and the engine that computed it first."""

    seq: int
    batch: Batch
    engine: str


def encode_entry(client: ClientScope, entry: Entry) -> bytes:
    """Write an entry.

    Args:
        client: whose journal it is for.
        entry: its engine (device kind and library version) takes at most 255 bytes of UTF-8.
    """
    batch, engine, dtype = entry.batch, entry.engine.encode(), entry.batch.dtype.encode()
    data = memoryview(batch.data).cast("B")
    sizes = len(engine), len(dtype), len(batch.parameters), data.nbytes, len(batch.shape)
    header = _ENTRY_HEADER.pack(entry.seq, batch.skipped, client.digest, *sizes)
    dimensions = struct.pack(f">{len(batch.shape)}I", *batch.shape)
    head = b"".join((header, engine, dtype, dimensions, batch.parameters))
    prefix = _ENTRY_PREFIX.pack(_ENTRY_MAGIC, _ENTRY_FORMAT, zlib.crc32(data, zlib.crc32(head)))
    return b"".join((prefix, head, data))


def decode_entry(blob: bytes, client: ClientScope, seq: int) -> Entry:
    """Verify an entry and read it; the data are a view into `blob`.

    Args:
        blob: what `encode_entry` wrote.
        client: whose journal it was found in.
        seq: the version it was found at.

    Raises:
        StateCorrupt: a wrong checksum, format, length, client or version.
    """
    view = memoryview(blob)
    try:
        magic, layout, checksum = _ENTRY_PREFIX.unpack_from(view)
        body = view[_ENTRY_PREFIX.size :]
        if (magic, layout) != (_ENTRY_MAGIC, _ENTRY_FORMAT) or zlib.crc32(body) != checksum:
            raise StateCorrupt(f"journal entry {seq} does not match its checksum, or has an unknown format")
        return _parsed(body, client, seq)
    except (struct.error, ValueError) as error:
        raise StateCorrupt(f"journal entry {seq} cannot be read: {error}") from error


def _parsed(body: memoryview, client: ClientScope, seq: int) -> Entry:
    written_seq, skipped, owner, *sizes, dimensions = _ENTRY_HEADER.unpack_from(body)
    if (written_seq, owner) != (seq, client.digest):
        raise StateCorrupt(f"journal entry {seq} belongs to another client or version")
    engine_size, dtype_size, parameters_size, data_size = sizes
    ends = [_ENTRY_HEADER.size]
    for size in (engine_size, dtype_size, 4 * dimensions, parameters_size, data_size):
        ends.append(ends[-1] + size)
    if ends[-1] != len(body):
        raise StateCorrupt(f"journal entry {seq} has {len(body)} bytes, its header says {ends[-1]}")
    engine, dtype, shape, parameters, data = (body[start:end] for start, end in pairwise(ends))
    sides = struct.unpack(f">{dimensions}I", shape)
    batch = Batch(bytes(dtype).decode(), sides, data, bytes(parameters), skipped)
    return Entry(seq, batch, bytes(engine).decode())


@dataclass(frozen=True, slots=True)
class Point:
    """One batch, several in a row, or something else that befell a client.

    Args:
        version: of the client's state, after the last of it.
        at_ms: when that was stored (Unix milliseconds).
        batches: how many, 0 for what is no batch.
        rows: images of these batches.
        measured: their means, by name: numbers, vectors, or numbers by name.
        events: what else befell it, and how often.
        verdict: of the guard, after the last of it; empty if there was none.
        replica: that had the client before, where another one took over; the last of them.
    """

    version: int = 0
    at_ms: float = 0.0
    batches: int = 0
    rows: int = 0
    measured: Mapping[str, Measured] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
    verdict: str = ""
    replica: str = ""

    def encode(self) -> bytes:
        """What is not known before it is stored is left out: its version, time and replica."""
        measured = {
            name: float(format(value, _DIGITS)) if isinstance(value, float) else _rounded(value)
            for name, value in self.measured.items()
        }
        return orjson.dumps([self.batches, self.rows, measured, self.events, self.verdict])

    @classmethod
    def decode(cls, stored: bytes) -> "Point":
        """A point as it is stored.

        Raises:
            StateCorrupt: it is none.
        """
        try:
            version, at_ms, replica, content = stored.split(b"|", 3)
            batches, rows, measured, events, verdict = orjson.loads(content)
            measured = {name: value for name, value in measured.items() if value is not None}  # was not finite
            if replica:
                events["takeover"] = max(1, events.get("takeover", 0))
            return cls(int(version), float(at_ms), batches, rows, measured, events, verdict, replica.decode())
        except (ValueError, TypeError, AttributeError) as error:
            raise StateCorrupt(f"a point of a timeline cannot be read: {error!r}") from error

    @staticmethod
    def batches_of(stored: bytes) -> int:
        """How many batches a stored point is of, without reading it whole; raises as `decode`."""
        try:
            begins = stored.index(b"[") + 1
            return int(stored[begins : stored.index(b",", begins)])
        except ValueError as error:
            raise StateCorrupt(f"a point of a timeline cannot be read: {error!r}") from error

    def store(self) -> bytes:
        """As it is stored, once it is known whole."""
        return b"|".join((b"%d" % self.version, b"%.3f" % self.at_ms, self.replica.encode(), self.encode()))

    def then(self, later: "Point") -> "Point":
        """Both as one."""
        events = {
            name: self.events.get(name, 0) + later.events.get(name, 0) for name in {**self.events, **later.events}
        }
        return replace(
            later,
            batches=self.batches + later.batches,
            rows=self.rows + later.rows,
            measured={
                name: _mean(self.measured.get(name), self.batches, later.measured.get(name), later.batches)
                for name in {**self.measured, **later.measured}
            },
            events=events,
            verdict=later.verdict or self.verdict,
            replica=later.replica or self.replica,
        )


def event(name: str) -> bytes:
    """A point that is no batch, as `Point.encode`."""
    return Point(events={name: 1}).encode()


def _rounded(value: Any) -> Measured:
    if isinstance(value, Mapping):
        return {name: float(format(each, _DIGITS)) for name, each in value.items()}
    if isinstance(value, Sequence):
        return [float(format(each, _DIGITS)) for each in value]
    return float(format(value, _DIGITS))


def _mean(one: Any, weight: int, other: Any, further: int) -> Measured:
    """Of two values, by their weights; the later one where they are not of one kind, or only one is there."""
    if one is None or other is None:
        return other if one is None else one  # type: ignore[no-any-return]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {name: _mean(one.get(name), weight, other.get(name), further) for name in {**one, **other}}  # type: ignore[misc]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_mean(a, weight, b, further) for a, b in zip(one, other, strict=True)]  # type: ignore[misc]
    if isinstance(one, float | int) and isinstance(other, float | int) and weight + further:
        return (weight * one + further * other) / (weight + further)
    return other  # type: ignore[no-any-return]
