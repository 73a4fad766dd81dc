"""Eight clients at once: each gets its own answers, and the service stays alive to its probes."""

import asyncio
import json
import subprocess
import sys
from contextlib import contextmanager

import numpy as np

from acclimate_client import AsyncClient

CLIENTS, BATCHES = 8, 30
QUICK_S, LONGEST_S = 0.02, 1.0
"""Half of the answers take less, for a step does not hold them up; and none takes longer, whatever else is running."""

PROBE = """
import http.client, json, sys, threading, time
connection = http.client.HTTPConnection(sys.argv[1])
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
times = []
while not ended.wait(0.005):
    began = time.perf_counter()
    connection.request("GET", "/v2/health/live")
    reply = connection.getresponse()
    assert json.load(reply) == {"live": True}
    times.append(time.perf_counter() - began)
print(json.dumps(times))
"""


@contextmanager
def probe(address, times):
    """Ask a service whether it lives, from a process of its own, over and over; afterwards `times` are seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROBE, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield
    finally:
        out, _ = process.communicate()
    times += json.loads(out)


async def run_client(sdk, name, batches):
    return [(await sdk.predict(name, images, probabilities=True)).probabilities for images in batches]


async def test_concurrent_clients_get_their_serial_answers_and_live_stays_quick(serve, stream, serial, record_property):
    streams = {f"cam-{number}": stream(number % 6, BATCHES, size=5 + number) for number in range(CLIENTS)}
    service = serve()
    times: list[float] = []
    async with AsyncClient(service.url) as sdk:
        with probe(service.url.removeprefix("http://"), times):
            runs = await asyncio.gather(*(run_client(sdk, name, batches) for name, batches in streams.items()))
        versions = [(await sdk.get(name)).state.version for name in streams]
    assert versions == [BATCHES] * CLIENTS
    for answers, batches in zip(runs, streams.values(), strict=True):
        expected = serial(batches)
        # the service chose another memory layout, whose last bits add up over so many batches
        assert all(np.allclose(a, e, rtol=0, atol=1e-4) for a, e in zip(answers, expected, strict=True))
    median, p99, longest = (1000 * float(np.quantile(times, share)) for share in (0.5, 0.99, 1))
    print(f"live: median {median:.1f}, p99 {p99:.1f}, longest {longest:.1f} ms over {len(times)} probes")
    assert len(times) > 100
    assert np.median(times) < QUICK_S
    assert max(times) < LONGEST_S
