"""What the state protocol is given to run: an adapter's states and steps, on the one thread that runs torch."""

import asyncio
import platform
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from acclimate_adapters import State, Step, guarded_step
from acclimate_service import answers
from acclimate_service.configuration import Configurations
from acclimate_service.state import Batch, Start
from acclimate_service.telemetry import Telemetry
from acclimate_service.worker import Worker
from acclimate_store import Bundle

PROBABILITIES: Final = b"probabilities"
"""Parameters of a batch whose answer is to hold the posterior of every image."""
_QUICK: Final = 64 * 1024
"""Bytes of a state above which writing and reading it would hold up the event loop."""
_HEADER_BYTES: Final = 400
_TENSOR_BYTES: Final = 100


@dataclass(frozen=True, slots=True)
class Adapted:
    """A client's state, and the configuration of the adapter that goes on with it."""

    configuration: str
    state: State


def batch_of(images: NDArray[Any], probabilities: bool = False) -> Batch:
    """A batch as a journal keeps it.

    Args:
        images: [B, C, H, W], uint8 or float32, before normalisation.
        probabilities: whether the answer is to hold the posterior of every image.
    """
    content = np.ascontiguousarray(images)
    return Batch(content.dtype.name, content.shape, content.data, PROBABILITIES if probabilities else b"")


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
        """Take the adapter's step, guarded, once `start` agrees."""

        def work() -> tuple[Adapted, bytes]:
            with self._telemetry.step_seconds.time():
                done = self.take(state, _images(batch))
            classes, with_probabilities = self._bundle.manifest.classes, batch.parameters == PROBABILITIES
            answer = answers.encode(done, classes, with_probabilities, batch.skipped)
            return Adapted(state.configuration, done.state), answer

        return await self._worker.run(work, start)

    def take(self, state: Adapted, images: NDArray[Any]) -> Step:
        """The step itself; blocking.

        Args:
            state: to go on from.
            images: [B, C, H, W], uint8 or float32, before normalisation.
        """
        adapter = self._configurations.adapter(state.configuration)
        return guarded_step(adapter, self._bundle.model, state.state, self._bundle.prepare(images))

    async def serialise(self, state: Adapted) -> bytes:
        """The bytes of a state, without its configuration."""
        if state.state.nbytes <= _QUICK:
            return state.state.to_bytes()
        return await asyncio.to_thread(state.state.to_bytes)

    async def deserialise(self, config: str, data: bytes) -> Adapted:
        """The state that `serialise` wrote."""
        if len(data) <= _QUICK:
            return Adapted(config, State.from_bytes(data))
        return Adapted(config, await asyncio.to_thread(State.from_bytes, data))

    def size(self, state: Adapted) -> int:
        """About how many bytes `serialise` gives."""
        return state.state.nbytes + _HEADER_BYTES + _TENSOR_BYTES * len(state.state.tensors)

    def adapter(self, state: Adapted) -> str:
        """Name of the adapter that made the state."""
        return state.state.adapter


def _images(batch: Batch) -> NDArray[Any]:
    return np.frombuffer(batch.data, batch.dtype).reshape(batch.shape)
