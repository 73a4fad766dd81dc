"""What the state protocol is given to run: an adapter's states and steps, on the one thread that runs torch."""

import asyncio
import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any, Final

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from acclimate_adapters import State, guarded_step
from acclimate_service import answers
from acclimate_service.configuration import Configurations
from acclimate_service.guard.evidence import ALPHA
from acclimate_service.guard.policy import Decision, by_own
from acclimate_service.guard.record import Label, Record
from acclimate_service.state import Batch, Start
from acclimate_service.telemetry import Telemetry
from acclimate_service.worker import Worker
from acclimate_store import Bundle

_QUICK: Final = 64 * 1024
"""Bytes of a state above which writing and reading it would hold up the event loop."""
_HEADER_BYTES: Final = 400
_TENSOR_BYTES: Final = 100


_ADAPTED: Final = Decision("adapted", "fleet_not_behind")
_FEEDBACK: Final = b"feedback"
_RECORD_MAGIC: Final = b"ACCG"
_RECORD_LENGTH: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Adapted:
    """A client's state, the configuration of the adapter that goes on with it, and the record that the guard keeps."""

    configuration: str
    state: State
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """All that decides a step and its answer beside state and images.

    Args:
        probabilities: whether the answer is to hold the posterior of every image.
        request_id: by which the rows are remembered; empty if they are not.
        against: configurations whose clients are to be answered unadapted, for what reason; a client's own evidence
            comes first.
        alpha: of the test of that evidence.
    """

    probabilities: bool = False
    request_id: str = ""
    against: Mapping[str, Decision] = field(default_factory=dict)
    alpha: float = ALPHA

    def encode(self) -> bytes:
        """As it is kept in a journal."""
        against = {name: decision.because for name, decision in self.against.items()}
        return orjson.dumps([self.probabilities, self.request_id, against, self.alpha])

    @classmethod
    def decode(cls, data: bytes) -> "Asked":
        """What `encode` wrote."""
        probabilities, request_id, against, alpha = orjson.loads(data)
        decisions = {name: Decision("frozen", because) for name, because in against.items()}
        return cls(probabilities, request_id, decisions, alpha)


def batch_of(images: NDArray[Any], asked: Asked | None = None) -> Batch:
    """A batch as a journal keeps it.

    Args:
        images: [B, C, H, W], uint8 or float32, before normalisation.
        asked: what is wanted.
    """
    content = np.ascontiguousarray(images)
    return Batch(content.dtype.name, content.shape, content.data, (asked or Asked()).encode())


def feedback_of(labels: Sequence[Label]) -> Batch:
    """Labels as a journal keeps them."""
    content = orjson.dumps([[each.request_id, each.row, each.label] for each in labels])
    return Batch("uint8", (len(content),), content, _FEEDBACK)


class AdapterMachine:
    """Makes, changes and serialises the states of one model's clients; equal inputs give equal results."""

    def __init__(self, bundle: Bundle, configurations: Configurations, worker: Worker, telemetry: Telemetry) -> None:
        """Take over the collaborators; whoever made them closes them."""
        self._bundle = bundle
        self._configurations = configurations
        self._worker = worker
        self._telemetry = telemetry
        self.engine = f"{bundle.model.device.type} {platform.machine()} torch {torch.__version__}"

    async def initial(self, config: str) -> Adapted:
        """The state of a client that has seen nothing."""
        adapter = self._configurations.adapter(config)
        return Adapted(config, await asyncio.to_thread(adapter.init, self._bundle.model))

    async def step(self, state: Adapted, batch: Batch, start: Start) -> tuple[Adapted, bytes]:
        """Take the adapter's step, guarded, once `start` agrees; or count labels, which changes the record alone."""
        if batch.parameters == _FEEDBACK:
            await start()
            return _count(state, batch)

        def work() -> tuple[Adapted, bytes]:
            with self._telemetry.step_seconds.time():
                return self._take(state, batch, Asked.decode(batch.parameters))

        return await self._worker.run(work, start)

    async def serialise(self, state: Adapted) -> bytes:
        """The bytes of a state and its record, without the configuration."""
        if self.size(state) <= _QUICK:
            return _pack(state)
        return await asyncio.to_thread(_pack, state)

    async def deserialise(self, config: str, data: bytes) -> Adapted:
        """The state that `serialise` wrote."""
        if len(data) <= _QUICK:
            return _unpack(config, data)
        return await asyncio.to_thread(_unpack, config, data)

    def size(self, state: Adapted) -> int:
        """About how many bytes `serialise` gives."""
        record = state.record.nbytes if state.record else 0
        return state.state.nbytes + record + _HEADER_BYTES + _TENSOR_BYTES * len(state.state.tensors)

    def adapter(self, state: Adapted) -> str:
        """Name of the adapter that made the state."""
        return state.state.adapter

    def _take(self, state: Adapted, batch: Batch, asked: Asked) -> tuple[Adapted, bytes]:
        model, classes = self._bundle.model, self._bundle.manifest.classes
        x = self._bundle.prepare(np.frombuffer(batch.data, batch.dtype).reshape(batch.shape))
        step = guarded_step(self._configurations.adapter(state.configuration), model, state.state, x)
        if not asked.request_id:
            answer = answers.encode(step, step.logits, classes, asked.probabilities, batch.skipped)
            return Adapted(state.configuration, step.state), answer
        frozen = step.frozen_logits if step.frozen_logits is not None else model.frozen(model.batch(x)).logits
        before = state.record or Record()
        decision = by_own(before.counts, asked.alpha) or asked.against.get(state.configuration, _ADAPTED)
        classes_of = (logits.argmax(dim=-1).tolist() for logits in (frozen, step.logits))
        record = before.append(asked.request_id, *classes_of, answering=decision.answer)
        given = frozen if decision.answer == "frozen" else step.logits
        answer = answers.encode(
            *(step, given, classes, asked.probabilities, batch.skipped, asked.request_id, decision),
            switched=decision.answer != before.answering,
        )
        return Adapted(state.configuration, step.state, record), answer


def _count(state: Adapted, batch: Batch) -> tuple[Adapted, bytes]:
    labels = [Label(*each) for each in orjson.loads(bytes(batch.data))]
    record, tally = (state.record or Record()).tell(labels)
    told = {"counts": astuple(record.counts), "born": record.born.hex(), "configuration": state.configuration}
    answer = orjson.dumps({"adapter": state.state.adapter, "feedback": asdict(tally), "told": told})
    return replace(state, record=record if state.record else None), answer


def _pack(state: Adapted) -> bytes:
    data = state.state.to_bytes()
    if state.record is None:
        return data
    record = state.record.to_bytes()
    return b"".join((_RECORD_MAGIC, _RECORD_LENGTH.pack(len(record)), record, data))


def _unpack(config: str, data: bytes) -> Adapted:
    if not data.startswith(_RECORD_MAGIC):  # safetensors begin with a length far below it
        return Adapted(config, State.from_bytes(data))
    start = len(_RECORD_MAGIC) + _RECORD_LENGTH.size
    (length,) = _RECORD_LENGTH.unpack_from(data, len(_RECORD_MAGIC))
    end = start + length
    return Adapted(config, State.from_bytes(data[end:]), Record.from_bytes(data[start:end]))
