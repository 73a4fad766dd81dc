"""A client's state beside what the guard remembers of its answers, and both as bytes."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from acclimate_adapters import State
from acclimate_adapters.compression.coding import decode, encode
from acclimate_service.compute.kept_images import KeptImage
from acclimate_service.guard.record import Record

_RECORD_MAGIC: Final = b"ACCG"
_RECORD_LENGTH: Final = struct.Struct(">I")
_PICTURE_MAGIC: Final = b"ACCP"
PICTURE_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class ClientState:
    """All that is kept of a client.

    Args:
        configuration: of the adapter that goes on with its state.
        state: its state.
        record: what the guard keeps.
        picture: digest of the client's latest batch if that was one picture, else empty.
        point: of the client's timeline, if a batch led to this state; it is not kept with it.
        images: its newest ones, where the operator allows it; they are never stored.
        beside: bytes of these images.
    """

    configuration: str
    state: State
    record: Record | None = None
    picture: bytes = b""
    point: bytes = field(default=b"", repr=False, compare=False)
    images: tuple[KeptImage, ...] = field(default=(), repr=False, compare=False)
    beside: int = field(default=0, compare=False)


def pack(state: ClientState, budget: float, weights: Mapping[str, float]) -> bytes:
    """The bytes of all but the configuration; budget and weights as in `coding.encode`."""
    pieces = [_PICTURE_MAGIC, state.picture] if state.picture else []
    if state.record is not None:
        record = state.record.to_bytes()
        pieces += [_RECORD_MAGIC, _RECORD_LENGTH.pack(len(record)), record]
    return b"".join((*pieces, encode(state.state, budget, weights)))


def unpack(configuration: str, data: bytes) -> ClientState:
    """The state that `pack` wrote, to go on under this configuration."""
    start, picture, record = 0, b"", None
    if data.startswith(_PICTURE_MAGIC):  # safetensors begin with a length far below it
        start = len(_PICTURE_MAGIC) + PICTURE_BYTES
        picture = data[len(_PICTURE_MAGIC) : start]
    if data.startswith(_RECORD_MAGIC, start):
        (length,) = _RECORD_LENGTH.unpack_from(data, start + len(_RECORD_MAGIC))
        begin = start + len(_RECORD_MAGIC) + _RECORD_LENGTH.size
        start = begin + length
        record = Record.from_bytes(data[begin:start])
    return ClientState(configuration, decode(data[start:] if start else data), record, picture)
