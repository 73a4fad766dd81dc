"""Labels under chaos: told by several callers, repeated and at once, to replicas that are killed; each counts once."""

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from exactly_once.fleet import Fleet

from acclimate_adapters import create, guarded_step
from acclimate_adapters.portfolio import MEMORY, counted
from acclimate_adapters.state import State
from acclimate_client import Client, LabelledRow
from acclimate_client.errors import AcclimateClientError
from acclimate_service.guard.evidence import WEIGHT
from acclimate_store import Catalogue

BUNDLES = Path(__file__).parents[2] / "model_store" / "bundles"
CLIENTS = 8
BATCHES = 20


def insist(call):
    """Repeat a request until it is answered; it keeps its idempotency key."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return call()
        except AcclimateClientError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def serve_and_tell(url, client, batches, dice):
    """Send batches, and tell the label of every row: in two overlapping parts, repeated, and both at once.

    Returns:
        The labels told, [N].
    """
    labels = list[int]()
    with Client(url, max_retries=0) as sdk, ThreadPoolExecutor(3) as pool:
        for number, images in enumerate(batches):
            key = f"{client}-{number}"
            prediction = insist(lambda: sdk.predict(client, images, idempotency_key=key))  # noqa: B023
            new = [dice.randrange(10) for _ in images]
            labels += new
            rows = [LabelledRow(prediction.request_id, row, label) for row, label in enumerate(new)]
            third = len(rows) // 3
            parts = {f"{key}-a": rows[:-third], f"{key}-b": rows[third:]}
            told = [
                pool.submit(insist, lambda key=key, part=part: sdk.feedback(client, part, idempotency_key=key))
                for key, part in [*parts.items(), *parts.items()]
            ]
            for each in told:
                each.result()
    return labels


def told_by_kind(batches, labels):
    """Labelled rows by which arms had them right, of an uninterrupted client; of the last batch only the first row."""
    bundle, adapter = Catalogue(BUNDLES).load("fashion-cnn"), create("portfolio")
    state, predicted = adapter.init(bundle.model), []
    for images in batches:
        step = guarded_step(adapter, bundle.model, state, bundle.prepare(images))
        state = step.state
        predicted.append(torch.cat([step.frozen_logits.argmax(-1, keepdim=True), step.by_arm], dim=1))
    rows = sum(map(len, batches[:-1])) + 1
    assert rows <= MEMORY, "beyond that, what is remembered depends on the order in which labels come"
    return tuple(counted(torch.cat(predicted)[:rows], torch.tensor(labels[:rows])).tolist())


@pytest.mark.slow
@pytest.mark.usefixtures("balanced")
@pytest.mark.parametrize(("adapter", "rows"), [("atp", 10), ("fedcal", 10), ("portfolio", 3)])
def test_no_label_is_lost_or_counted_twice_by_replicas_that_are_killed(tmp_path, stream, adapter, rows):
    over, dice = threading.Event(), random.Random(adapter)

    def kill(fleet):
        while not over.wait(dice.uniform(0.1, 0.5)):
            if fleet.serves():
                dice.choice(fleet.replicas).send(signal.SIGKILL)

    settings = {"adapter": adapter, "guard": "adapt"}
    with Fleet(tmp_path, [settings, settings], sticky=False) as fleet, ThreadPoolExecutor(CLIENTS + 1) as pool:
        url = fleet.balancer.url
        killing = pool.submit(kill, fleet)
        try:
            runs = [
                pool.submit(
                    serve_and_tell, url, f"cam-{n}", [images[:rows] for images in stream(n, BATCHES)], random.Random(n)
                )
                for n in range(CLIENTS)
            ]
            labels = [run.result() for run in runs]
        finally:
            over.set()
        killing.result()
        with Client(url, max_retries=0) as sdk:
            for number in range(CLIENTS):
                client = f"cam-{number}"
                (images,) = stream(number, 1)
                prediction = insist(lambda: sdk.predict(client, images))  # noqa: B023
                last = [LabelledRow(prediction.request_id, 0, 0)]
                told = insist(lambda: sdk.feedback(client, last))  # noqa: B023
                assert told.guard.evidence.labelled == BATCHES * rows + 1
                left = insist(lambda: [*sdk.asks(client)])  # noqa: B023
                assert {each.request_id for each in left} <= {prediction.request_id}, "all others are answered"
                if adapter == "portfolio":
                    state = State.from_bytes(insist(lambda: sdk.export_state(client)))  # noqa: B023
                    sent = [*(each[:rows] for each in stream(number, BATCHES)), images]
                    assert create(adapter).told(state) == told_by_kind(sent, [*labels[number], 0])
            evidence = insist(lambda: sdk.evidence("fashion-cnn"))
        (row,) = evidence.adapters
        assert (row.clients, row.evidence.labelled) == (CLIENTS, CLIENTS * WEIGHT)
        assert fleet.ends["by SIGKILL"] >= 2
        print(f"{CLIENTS * BATCHES * rows} labels told four times over; replicas ended: {dict(fleet.ends)}")
