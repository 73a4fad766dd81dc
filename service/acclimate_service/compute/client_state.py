"""A client's state beside what the guard remembers of its answers, and both as bytes."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from acclimate_adapters import State
from acclimate_adapters.compression.coding import decode, encode
from acclimate_service.guard.record import Record

_RECORD_MAGIC: Final = b"ACCG"
_RECORD_LENGTH: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class ClientState:
    """A client's state, the configuration of the adapter that goes on with it, and the record that the guard keeps."""

    configuration: str
    state: State
    record: Record | None = None


def pack(state: ClientState, budget: float, weights: Mapping[str, float]) -> bytes:
    """The bytes of a state and its record, without the configuration; budget and weights as in `coding.encode`."""
    data = encode(state.state, budget, weights)
    if state.record is None:
        return data
    record = state.record.to_bytes()
    return b"".join((_RECORD_MAGIC, _RECORD_LENGTH.pack(len(record)), record, data))


def unpack(configuration: str, data: bytes) -> ClientState:
    """The state that `pack` wrote, to go on under this configuration."""
    if not data.startswith(_RECORD_MAGIC):  # safetensors begin with a length far below it
        return ClientState(configuration, decode(data))
    start = len(_RECORD_MAGIC) + _RECORD_LENGTH.size
    (length,) = _RECORD_LENGTH.unpack_from(data, len(_RECORD_MAGIC))
    end = start + length
    return ClientState(configuration, decode(data[end:]), Record.from_bytes(data[start:end]))
