"""The way of a batch stays short: how many functions of how many files are called for one warm batch by journal."""

import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

import acclimate_service
from acclimate_service import replica as replica_module
from acclimate_service.http.context import RequestContext
from acclimate_service.state import journal

MOST_CALLS = 150
MOST_FILES = 25
OWN = str(Path(acclimate_service.__file__).parent)
INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>"}
"""No calls from Python 3.12 on."""
BESIDE = {"_supervise"}
"""Of the private Redis, whenever its time has come."""
ONCE = {"Http1.data_received", "Http1._feed", "Http1._watch_head", "Http1._busy"}
"""Called for each piece in which a request comes; how many there are is the network's affair."""


class Calls:
    """Frames of the service that begin on a thread; a coroutine that goes on is no new one."""

    def __init__(self):
        self._frames = {}

    def note(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OWN) and code.co_name not in INLINED | BESIDE:
            self._frames[id(frame)] = frame  # kept, so that no other frame takes its id

    @property
    def functions(self):
        codes = [frame.f_code for frame in self._frames.values()]
        counted = Counter((code.co_filename.removeprefix(OWN), code.co_qualname) for code in codes)
        return Counter({each: 1 if each[1] in ONCE else number for each, number in counted.items()})


async def watch(note):
    sys.setprofile(note)


def test_a_warm_batch_is_answered_in_few_calls_of_few_files(make_replica, stream, post, monkeypatch):
    monkeypatch.setattr(replica_module, "LOOK_S", 3600)  # what is done every second is no part of a batch
    replica, batches = make_replica(adapter="atp"), stream(0, 9)
    for images in batches[:5]:
        assert post(replica, "cam", images).status_code == 200
    assert replica.metric('acclimate_state_commits_total{result="appended",way="delta"}') == 5
    time.sleep(0.2)  # what follows the reply in the background
    calls, counted = Calls(), []
    worker = replica.service.worker
    worker._lane.executor.submit(sys.setprofile, calls.note).result()
    replica.run(watch(calls.note))
    try:
        for version, images in enumerate(batches[5:], start=6):
            calls._frames = {}
            reply = post(replica, "cam", images).json()["state"]
            time.sleep(0.2)
            assert (reply["version"], reply["status"]) == (version, "warm")
            counted.append(calls.functions)
    finally:
        replica.run(watch(None))
        worker._lane.executor.submit(sys.setprofile, None).result()
    functions = min(counted, key=Counter.total)  # what is old may be refreshed meanwhile
    files = {file for file, _ in functions}
    said = "\n".join(f"{number:3} {file} {name}" for (file, name), number in sorted(functions.items()))
    assert 50 < functions.total() <= MOST_CALLS, said
    assert len(files) <= MOST_FILES, sorted(files)


def test_the_images_of_a_batch_are_those_of_its_body_until_they_are_written(make_replica, stream, post, monkeypatch):
    replica, (images,) = make_replica(adapter="atp"), stream(0, 1)
    bodies, written, read, encode = [], [], RequestContext.body, journal.encode_entry

    async def body(*args):
        bodies.append(await read(*args))
        return bodies[-1]

    def encode_entry(client, entry):
        written.append(entry.batch.data)
        return encode(client, entry)

    monkeypatch.setattr(RequestContext, "body", body)
    monkeypatch.setattr(journal, "encode_entry", encode_entry)
    assert post(replica, "cam", images).json()["state"]["version"] == 1
    (sent,), (kept,) = bodies, written
    assert np.shares_memory(np.frombuffer(sent, np.uint8), np.frombuffer(kept, np.uint8))
