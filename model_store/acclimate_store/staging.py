"""The way of a batch to a CUDA device: through memory that the device reads by itself while the host goes on."""

import threading
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SMALLEST: Final = 4096
"""Bytes of the smallest buffer; the others have twice the bytes of the one before."""


class _Buffer:
    """Host memory whose content is on its way to a device until `free` says otherwise."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._sent = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, batch: NDArray[Any]) -> Tensor:
        """Copy a batch to the device, once what was sent before has arrived."""
        if self._sent is not None:
            self._sent.synchronize()
        dtype = torch.from_numpy(np.empty(0, batch.dtype)).dtype
        host = self._bytes[: batch.nbytes].view(dtype).view(batch.shape)
        np.copyto(host.numpy(), batch)
        there = torch.empty(batch.shape, dtype=dtype, device=self._device)
        there.copy_(host, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))
        return there


class Staging:
    """Sends batches to one device, each size class in turn through two buffers: one is filled while the other is read.

    May be used by several threads at once. Buffers stay for good: at most four times the bytes of the largest batch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[int, tuple[_Buffer, _Buffer]] = {}
        self._lock = threading.Lock()

    def send(self, batch: NDArray[Any]) -> Tensor:
        """A batch on the device, in its own type; it is copied, so the caller may reuse its memory at once.

        Args:
            batch: of any shape, and of a type that torch has.

        Raises:
            TypeError: torch has no such type.
        """
        nbytes = max(_SMALLEST, 1 << (batch.nbytes - 1).bit_length())
        with self._lock:
            near, far = self._buffers.get(nbytes) or (_Buffer(nbytes, self._device), _Buffer(nbytes, self._device))
            self._buffers[nbytes] = far, near
            return near.send(batch)
