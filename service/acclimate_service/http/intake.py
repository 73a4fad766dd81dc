"""What the requests to one model share."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from acclimate_service.clients.admission import DynamicThreshold
from acclimate_service.compute.process import available_cores, return_freed_memory, take_threads
from acclimate_service.http.payload import PayloadLimits
from acclimate_service.replica import Replica
from acclimate_service.served import Served

MAX_DECODING: Final = 64
"""Bodies that may be decoded at the same time, in turns; further ones get 429."""
LARGE: Final = 64 * 2**20
"""Bytes that requests held together after which the C library has kept much of what was freed."""
_FREED_S: Final = 1.0
"""Time in which what a request held is freed after its end."""


class Intake:
    """The room for what the requests to one model hold in memory, and the threads that decode their bodies.

    Args:
        replica: what answers all requests.
        served: the model, whose versions answer these.
        beside: the intake of another model of this process, with which it shares room and threads.
    """

    def __init__(self, replica: Replica, served: Served, beside: "Intake | None" = None) -> None:
        settings = served.settings
        self.replica = replica
        self.served = served
        self.name = served.name
        self.limits = PayloadLimits(max_images=settings.max_images, max_pixels=settings.max_pixels)
        if beside is None:
            self.memory = DynamicThreshold(settings.max_held_bytes, "bytes")
            self.decoding = DynamicThreshold(MAX_DECODING, "bodies to be decoded")
            self.threads = ThreadPoolExecutor(available_cores(), "acclimate-decode", partial(take_threads, 1))
        else:
            self.memory, self.decoding, self.threads = beside.memory, beside.decoding, beside.threads

    def give_back(self) -> None:
        """Give memory back to the kernel, once most of what requests held is free again: others would pay for it."""
        if self.memory.taken <= self.memory.most // 4:
            self.memory.most = self.memory.taken
            asyncio.get_running_loop().call_later(_FREED_S, self.threads.submit, return_freed_memory)
