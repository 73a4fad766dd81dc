"""More is asked for than the device can do: what is accepted is answered in time, the rest is told when to come."""

import json
import threading
import time

import numpy as np
import pytest
from hostile.wire import Target, batch

BOUND_S = 2.0
ROWS = 128


class Flood:
    """Callers that each send one batch after the other until told to stop, and come back when they are told."""

    def __init__(self, url, callers):
        self.accepted, self.retry_after, self.wrong = [], [], []
        self._url, self._stop = url, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(f"flood-{number}",)) for number in range(callers)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, client):
        target = Target(self._url)
        with target.connect() as connection:
            while not self._stop.is_set():
                began = time.monotonic()
                reply = target.ask(batch(client, ROWS), connection)
                if reply is None or reply.status not in {200, 429}:
                    self.wrong.append(reply)
                    return
                if reply.status == 200:
                    self.accepted.append(time.monotonic() - began)
                else:
                    self.retry_after.append(int(reply.headers["Retry-After"]))
                    self._stop.wait(self.retry_after[-1])


def alone(url):
    """Seconds that one caller waits for a batch: the shortest of some."""
    target, seconds = Target(url), []
    for _ in range(8):
        began = time.monotonic()
        assert target.ask(batch("alone", ROWS)).status == 200
        seconds.append(time.monotonic() - began)
    return float(np.median(seconds))


@pytest.mark.slow
def test_at_four_times_capacity_accepted_batches_wait_about_the_bound(serve, record_property):
    service = serve(adapter="atp", max_queue_ms=1000 * BOUND_S, guard="off")
    each = alone(service.url)
    callers = min(200, round(4 * BOUND_S / each) + 4)
    light, refused = [], 0
    with Flood(service.url, callers) as flood:
        time.sleep(3)  # what steps take in this noise is learned
        del flood.accepted[:]
        target = Target(service.url)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            began = time.monotonic()
            reply = target.ask(batch("light", 5))
            refused += reply is None or reply.status != 200
            light.append(time.monotonic() - began)
            time.sleep(0.2)
    p99 = float(np.quantile(flood.accepted, 0.99))
    figures = {
        "a batch alone (s)": each,
        "callers": callers,
        "accepted": len(flood.accepted),
        "p50, p99 of accepted (s)": [float(np.median(flood.accepted)), p99],
        "refused": len(flood.retry_after),
        "p50, p99 of a light client (s)": [float(np.median(light)), float(np.quantile(light, 0.99))],
    }
    record_property("figures", json.dumps(figures))
    print(json.dumps(figures, indent=1))
    assert not flood.wrong
    assert flood.retry_after, "nobody was refused"
    assert set(flood.retry_after) <= {1, 2, 3, 4, 5}
    assert p99 <= 2 * (BOUND_S + each)
    assert not refused
    assert np.median(light) <= np.median(flood.accepted)
