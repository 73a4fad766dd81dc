"""The envelope around a stored state: it says whose state it is, and proves that the bytes are the ones written.

Layout, big-endian: magic `ACCS`, format (1), client digest (16 bytes), model hash (8), version (8), length of the state
(8), length of the adapter name (1), the name, the state.
"""

import asyncio
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Final, TypeVar

from acclimate_service.state.errors import StateCorrupt
from acclimate_service.state.records import Restored
from acclimate_service.state.redis.keys import ClientScope

T = TypeVar("T")
_HEADER: Final = struct.Struct(">4sB16s8sQQB")
_MAGIC: Final = b"ACCS"
_FORMAT: Final = 1
_LONGEST_NAME: Final = 255
_ON_LOOP: Final = 256 * 1024
"""Bytes hashed in well below a millisecond; more would stall the event loop."""


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
    header = _HEADER.pack(_MAGIC, _FORMAT, client.digest(), bytes.fromhex(model), seq, len(state), len(name))
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
    if total < _HEADER.size:
        raise StateCorrupt(f"the stored state is cut off after {total} bytes, inside its envelope")
    magic, layout, owner, model_hash, written_seq, length, name_length = _HEADER.unpack_from(opening)
    found = (magic, layout, owner, model_hash, written_seq)
    if found != (_MAGIC, _FORMAT, client.digest(), bytes.fromhex(model), seq):
        raise StateCorrupt("the stored state belongs to another client, model or version, or has an unknown format")
    start = _HEADER.size + name_length
    if total != start + length:
        raise StateCorrupt(f"the stored state is {total - start} bytes long, its envelope says {length}")
    return Restored(opening[_HEADER.size : start].decode(), seq, _joined(pieces, start))


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
        opening += piece[: _HEADER.size + _LONGEST_NAME - len(opening)]
    return opening


def _joined(pieces: Sequence[bytes], start: int) -> bytes:
    """All bytes from `start` on, copied piece by piece: in one go, no other thread had its turn before the last."""
    joined = BytesIO()
    for piece in pieces:
        joined.write(memoryview(piece)[start:])
        start = max(0, start - len(piece))
    return joined.getvalue()
