"""A batch, as a journal keeps it until a snapshot covers it.

Layout of an entry, big-endian: magic `ACCJ`, format (1), CRC-32 of all that follows (4); version (8), batches skipped
before it (8), client digest (16), lengths of engine, dtype (1 each), parameters (4) and data (8), number of dimensions
(1); then engine, dtype, dimensions (4 each), parameters, data.
"""

import math
import struct
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from acclimate_service.state.errors import StateCorrupt
from acclimate_service.state.redis.keys import ClientScope

_PREFIX: Final = struct.Struct(">4sBI")
_HEADER: Final = struct.Struct(">QQ16sBBIQB")
_MAGIC: Final = b"ACCJ"
_FORMAT: Final = 2
ITEM_BYTES: Final = {"uint8": 1, "float16": 2, "float32": 4}
"""Bytes per element of the accepted dtypes; elements are little-endian."""


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


def encode(client: ClientScope, entry: Entry) -> bytes:
    """Write an entry.

    Args:
        client: whose journal it is for.
        entry: its engine (device kind and library version) takes at most 255 bytes of UTF-8.
    """
    batch, engine, dtype = entry.batch, entry.engine.encode(), entry.batch.dtype.encode()
    data = memoryview(batch.data).cast("B")
    sizes = len(engine), len(dtype), len(batch.parameters), data.nbytes, len(batch.shape)
    header = _HEADER.pack(entry.seq, batch.skipped, client.digest(), *sizes)
    dimensions = struct.pack(f">{len(batch.shape)}I", *batch.shape)
    head = b"".join((header, engine, dtype, dimensions, batch.parameters))
    prefix = _PREFIX.pack(_MAGIC, _FORMAT, zlib.crc32(data, zlib.crc32(head)))
    return b"".join((prefix, head, data))


def decode(blob: bytes, client: ClientScope, seq: int) -> Entry:
    """Verify an entry and read it; the data are a view into `blob`.

    Args:
        blob: what `encode` wrote.
        client: whose journal it was found in.
        seq: the version it was found at.

    Raises:
        StateCorrupt: a wrong checksum, format, length, client or version.
    """
    view = memoryview(blob)
    try:
        magic, layout, checksum = _PREFIX.unpack_from(view)
        body = view[_PREFIX.size :]
        if (magic, layout) != (_MAGIC, _FORMAT) or zlib.crc32(body) != checksum:
            raise StateCorrupt(f"journal entry {seq} does not match its checksum, or has an unknown format")
        return _parse(body, client, seq)
    except (struct.error, ValueError) as error:
        raise StateCorrupt(f"journal entry {seq} cannot be read: {error}") from error


def _parse(body: memoryview, client: ClientScope, seq: int) -> Entry:
    written_seq, skipped, owner, *sizes, dimensions = _HEADER.unpack_from(body)
    if (written_seq, owner) != (seq, client.digest()):
        raise StateCorrupt(f"journal entry {seq} belongs to another client or version")
    engine_size, dtype_size, parameters_size, data_size = sizes
    ends = [_HEADER.size]
    for size in (engine_size, dtype_size, 4 * dimensions, parameters_size, data_size):
        ends.append(ends[-1] + size)
    if ends[-1] != len(body):
        raise StateCorrupt(f"journal entry {seq} has {len(body)} bytes, its header says {ends[-1]}")
    engine, dtype, shape, parameters, data = (body[start:end] for start, end in pairwise(ends))
    sides = struct.unpack(f">{dimensions}I", shape)
    batch = Batch(bytes(dtype).decode(), sides, data, bytes(parameters), skipped)
    return Entry(seq, batch, bytes(engine).decode())
