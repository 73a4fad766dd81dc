"""The envelope around a stored state: it says whose state it is, and proves that the bytes are the ones written.

Layout, big-endian: magic `ACCS`, format (1), client digest (16 bytes), model hash (8), version (8), length of the state
(8), length of the adapter name (1), the name, the state.
"""

import asyncio
import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from acclimate_service.state.errors import StateCorrupt
from acclimate_service.state.keys import ClientScope
from acclimate_service.state.records import Restored

T = TypeVar("T")
_HEADER: Final = struct.Struct(">4sB16s8sQQB")
_MAGIC: Final = b"ACCS"
_FORMAT: Final = 1
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
    if len(name) > 255:
        raise ValueError(f"the adapter name takes {len(name)} bytes; accepted are at most 255")
    header = _HEADER.pack(_MAGIC, _FORMAT, client.digest(), bytes.fromhex(model), seq, len(state), len(name))
    blob = b"".join((header, name, state))
    return Sealed(blob, hashlib.sha256(blob).hexdigest())


def unseal(sealed: Sealed, client: ClientScope, model: str, seq: int) -> Restored:
    """Verify an envelope against what its head says, and take the state out.

    Raises:
        StateCorrupt: a wrong digest, length, format, client, model or version.
    """
    if hashlib.sha256(sealed.blob).hexdigest() != sealed.digest:
        raise StateCorrupt("the stored state does not match its checksum")
    if len(sealed.blob) < _HEADER.size:
        raise StateCorrupt(f"the stored state is cut off after {len(sealed.blob)} bytes, inside its envelope")
    magic, layout, owner, model_hash, written_seq, length, name_length = _HEADER.unpack_from(sealed.blob)
    found = (magic, layout, owner, model_hash, written_seq)
    if found != (_MAGIC, _FORMAT, client.digest(), bytes.fromhex(model), seq):
        raise StateCorrupt("the stored state belongs to another client, model or version, or has an unknown format")
    start = _HEADER.size + name_length
    if len(sealed.blob) != start + length:
        raise StateCorrupt(f"the stored state is {len(sealed.blob) - start} bytes long, its envelope says {length}")
    return Restored(sealed.blob[_HEADER.size : start].decode(), seq, sealed.blob[start:])


async def hashing(work: Callable[[], T], size: int) -> T:
    """Run `seal` or `unseal` on `size` bytes: off the event loop where it takes long."""
    return work() if size <= _ON_LOOP else await asyncio.to_thread(work)
