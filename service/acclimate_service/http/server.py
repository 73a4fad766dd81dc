"""uvicorn, which gives load balancers time to learn that this replica is about to end."""

import array
import asyncio
import resource
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from types import FrameType

import uvicorn

from acclimate_service.replica import Replica

SO_ATTACH_FILTER = 26
"""Linux's number for the option, which the module `socket` does not name."""
DROP_SYN = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
"""Classic BPF: load byte 13 of the TCP header, its flags; if SYN is not among them skip one; drop; let through."""
LAST_IN_S = 0.1
"""Time for handshakes under way to end, and for the requests that follow them to come."""
LAST_IN_ROUNDS = 10
"""So many times at most, should the loop be too busy to accept all within the first."""
QUIET_ROUNDS = 2
"""So many in a row in which nobody waited: what a busy loop accepts in one round it reads from in the next."""


class DrainingServer(uvicorn.Server):
    """On SIGTERM, says for a while that it is not ready and ends its connections one by one, then ends.

    SIGINT, or a second SIGTERM, ends it at once: requests under way are answered all the same.
    """

    def __init__(self, config: uvicorn.Config, replica: Replica, lead_s: float) -> None:
        """Drain the replica for so many seconds before its end."""
        super().__init__(config)
        allow_files()
        self._replica = replica
        self._lead_s = lead_s
        self._loop = asyncio.get_running_loop()

    def heed_signals(self) -> None:
        """Obey from now on; uvicorn itself only does while it serves, and raises the signals again when it ends."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, or to end."""
        if sig != signal.SIGTERM or self._replica.draining or not self._lead_s:
            self._replica.draining = True
            super().handle_exit(sig, frame)
        else:
            self._replica.draining = True
            self._loop.call_soon_threadsafe(self._loop.call_later, self._lead_s, super().handle_exit, sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let in whoever is connected and nobody else, then end as uvicorn does."""
        await let_last_in(sockets or [])
        await super().shutdown(sockets)


def allow_files() -> None:
    """Take as many file descriptors as the process may have: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def let_last_in(listeners: list[socket.socket]) -> None:
    """Have the running loop accept every connection that its peer takes for made, so that closing resets none.

    The kernel resets what is connected but not accepted when its listener closes, and what is accepted when it closes
    with bytes that nobody read. A balancer cannot know that nobody looked at its request, and repeats no POST. Whose
    SYN is dropped sends it again after 1 s, and then meets a closed port or the next process: nothing was sent, so the
    balancer may turn elsewhere. Without Linux this does nothing.
    """
    if sys.platform == "linux":
        for listener in listeners:
            refuse_newcomers(listener)
        quiet = 0
        for _ in range(LAST_IN_ROUNDS):
            await asyncio.sleep(LAST_IN_S)
            quiet = 0 if any(map(_has_waiting, listeners)) else quiet + 1
            if quiet == QUIET_ROUNDS:
                break


def refuse_newcomers(listener: socket.socket) -> None:
    """Drop every SYN to a listening TCP socket of Linux.

    All else passes: the ACK that ends a handshake under way comes to the listener too, and without it a peer that takes
    its connection for made would be reset. What was connected before has no part in the filter.
    """
    code = array.array("B", b"".join(struct.pack("HBBI", *step) for step in DROP_SYN))
    program = struct.pack("HP", len(DROP_SYN), code.buffer_info()[0])
    with suppress(OSError):  # a kernel without filters: a few connections are reset, as without this
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def _has_waiting(listener: socket.socket) -> bool:
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    return bool(poller.poll(0))
