"""Memory that requests held goes back to the kernel once they have gone."""

import time
from contextlib import ExitStack

from hostile.run import resident_mb
from hostile.wire import Target, batch, head

UPLOADS, MB = 6, 25


def test_what_unfinished_uploads_held_is_given_back(serve):
    service = serve()
    target = Target(service.url)
    for _ in range(3):
        assert target.ask(batch("cam", 20)).status == 200
    before = resident_mb(service.pid)
    with ExitStack() as held:
        for number in range(UPLOADS):
            connection = held.enter_context(target.connect())
            connection.sendall(head("PUT", f"/clients/upload-{number}/state", 250 * 2**20) + bytes(MB * 2**20))
        await_memory(service.pid, lambda mb: mb > before + 0.8 * UPLOADS * MB)
    await_memory(service.pid, lambda mb: mb < before + 0.4 * UPLOADS * MB)


def await_memory(pid, wanted):
    deadline = time.monotonic() + 30
    while not wanted(resident_mb(pid)):
        assert time.monotonic() < deadline, resident_mb(pid)
        time.sleep(0.05)
