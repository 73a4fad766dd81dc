"""The whole deployment under chaos: every acknowledged batch is applied once, and answered as if nothing had happened.

`EXACTLY_ONCE_SEED` and `EXACTLY_ONCE_BATCHES` choose another run, as `python tests/e2e/exactly_once` does.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from exactly_once.callers import Caller, Ledger
from exactly_once.changes import Changer
from exactly_once.fleet import Fleet
from exactly_once.run import run
from exactly_once.streams import batches, load_bundle

from acclimate_client import Client

SEED = int(os.environ.get("EXACTLY_ONCE_SEED", "7"))
BATCHES = int(os.environ.get("EXACTLY_ONCE_BATCHES", "2000"))
CONNECTIONS = 8


@pytest.mark.slow
@pytest.mark.usefixtures("balanced")
def test_every_batch_is_applied_once_and_answered_as_in_a_serial_run_whatever_is_killed(tmp_path):
    report = run(SEED, BATCHES, tmp_path)
    print(report)
    assert report.ledger.batches == BATCHES
    assert report.verdict.violations == []


class Doubling:
    """An SDK that sends one kind of call twice, as if it were another one."""

    def __init__(self, sdk, kind):
        self._sdk = sdk
        self._kind = kind

    def __getattr__(self, name):
        call = getattr(self._sdk, name)
        if name != self._kind:
            return call

        def twice(*args, **options):
            call(*args, **{**options, "idempotency_key": None})
            return call(*args, **options)

        return twice


def test_what_is_applied_twice_is_seen(serve):
    url, bundle, sent = serve().url, load_bundle(), batches(0, 3)
    for kind in ("none", "predict", "feedback", "reset", "import_state"):
        ledger = Ledger()
        with Client(url) as sdk:
            Changer(Caller(Doubling(sdk, kind), ledger, ""), f"double-{kind}", sent, bundle).run("", 5)
        assert bool(ledger.violations) == (kind != "none"), (kind, ledger.violations)


def keep_sending(url, client, images, over):
    """Versions of a client's batches, one after the other, by an SDK that may retry."""
    versions = []
    with Client(url) as sdk:
        while not over.is_set():
            versions.append(sdk.predict(client, images).state.version)
    return versions


@pytest.mark.slow
@pytest.mark.usefixtures("balanced")
def test_no_batch_is_lost_and_hardly_one_refused_while_every_replica_is_restarted_under_load(stream, tmp_path):
    images, over = stream(0, 1)[0], threading.Event()
    with ThreadPoolExecutor(CONNECTIONS) as pool, Fleet(tmp_path, [{}, {}], sticky=True) as fleet:
        url = fleet.balancer.url
        runs = [pool.submit(keep_sending, url, f"cam-{number}", images, over) for number in range(CONNECTIONS)]
        try:
            for replica in fleet.replicas:
                fleet.restart(replica)
        finally:
            over.set()
        versions = [each.result() for each in runs]
        refusals = fleet.balancer.failures()
    assert fleet.ends == {"by SIGTERM": 2}
    for each in versions:
        assert each == list(range(1, len(each) + 1))
        assert len(each) > 1
    print(f"{sum(map(len, versions))} batches; refused at first, and sent again by the SDK: {dict(refusals)}")
    # A connection that the kernel took just before the listener was closed is reset, and nginx may not send again.
    assert sum(refusals.values()) <= 2
