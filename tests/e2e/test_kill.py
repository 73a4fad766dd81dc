"""The service is killed, in the middle of streams and of requests; nothing is lost and nothing applied twice."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from acclimate_adapters import create, guarded_step
from acclimate_adapters.labels import Labelled
from acclimate_adapters.state import State
from acclimate_client import Client, ConnectionFailed, LabelledRow
from acclimate_client.errors import KeyReusedError
from acclimate_store import Catalogue

BUNDLES = Path(__file__).parents[2] / "model_store" / "bundles"


def test_a_stream_goes_on_after_kills_as_if_there_had_been_none(serve, stream, serial):
    """Kills between batches and at moments of a batch: while it is sent, computed, committed or answered."""
    batches = stream(0, 12)
    moments = {3: None, 5: 0.005, 7: 0.015, 9: 0.035}  # seconds after the batch was sent; None: before
    answers, replays = [], []
    service = serve()
    with ThreadPoolExecutor(1) as pool:
        for number, images in enumerate(batches):
            if number in moments:
                interrupted = (
                    pool.submit(send, service.url, 0, images=images, number=number)
                    if moments[number] is not None
                    else None
                )
                time.sleep(moments[number] or 0)
                service.kill()
                if interrupted is not None:
                    assert interrupted.exception() is None or isinstance(interrupted.exception(), ConnectionFailed)
                service = serve()
                check_repeat(service.url, batches, number - 1, answers[-1])
            prediction = send(service.url, images=images, number=number)
            answers.append(prediction.probabilities)
            replays.append(prediction.state.replayed)
            assert prediction.state.version == number + 1
    assert set(replays) <= {"none", "stored", "recomputed"}
    for answer, expected in zip(answers, serial(batches), strict=True):
        assert np.allclose(answer, expected, rtol=0, atol=1e-5)
    with Client(service.url) as client:
        assert client.get("cam").state.version == len(batches)


def check_repeat(url, batches, number, answer):
    """A batch that was answered before a kill gets the same answer after it, and its key takes no other batch."""
    again = send(url, images=batches[number], number=number)
    assert again.state.version == number + 1
    assert again.state.replayed in ("stored", "recomputed")
    assert np.allclose(again.probabilities, answer, rtol=0, atol=1e-5)
    with pytest.raises(KeyReusedError):
        send(url, images=batches[number + 1], number=number)


def send(url, max_retries=4, *, images, number):
    """Send one batch under a key of its own.

    The answers of a journal are stored just after the reply. Where the kill came first, the killed replica may still be
    computing it as far as anybody knows: until its lease ends, `request_running` asks for another try.
    """
    with Client(url, max_retries=max_retries) as client:
        return client.predict("cam", images, probabilities=True, idempotency_key=f"batch-{number}")


ARMS = ["fedcal(estimator=em)", "bn_adapt+em"]
PORTFOLIO = {
    "adapter": "portfolio",
    "adapter_options": json.dumps({"arms": ARMS}),
    "guard": "adapt",
    "ask_budget": 0.2,
    "inline_max": 1,
}


@pytest.mark.slow
def test_arms_questions_and_labels_go_on_after_kills_as_if_there_had_been_none(serve, stream):
    """Kills while a batch is sent or computed, and while labels are told; the labels prefer another arm than at first.

    The same batch asks the same after a kill, and each label counts once: for the arms of the client, and of the fleet.
    """
    batches, model = stream(0, 14), Catalogue(BUNDLES).load("fashion-cnn")
    adapter = create("portfolio", arms=ARMS)
    state, told, seen = adapter.init(model.model), 0, set()
    service = serve(**PORTFOLIO)
    with ThreadPoolExecutor(1) as pool:

        def interrupted(call, seconds):
            """What it gives when it is called again, after a kill so long after it was called."""
            nonlocal service
            first = pool.submit(call, service.url, 0)
            time.sleep(seconds)
            service.kill()
            assert first.exception() is None or isinstance(first.exception(), ConnectionFailed)
            service = serve(**PORTFOLIO)
            again = call(service.url)
            return again, again if first.exception() else first.result()

        for number, images in enumerate(batches):
            moment = {3: 0.004, 6: 0.012, 9: 0.03}.get(number)
            call = partial(send, images=images, number=number)
            answer, first = interrupted(call, moment) if moment else [call(service.url)] * 2
            assert (answer.request_id, answer.ask) == (first.request_id, first.ask)
            if told:
                state = adapter.informed(state, adapter.shares(model.model, adapter.told(state)))
            step = guarded_step(adapter, model.model, state, model.prepare(images))
            state = step.state
            assert np.allclose(answer.probabilities, step.logits.double().softmax(dim=-1), rtol=0, atol=1e-5)
            assert answer.signals["arm"] == step.signals["arm"]
            seen.add(int(answer.signals["arm"]))
            if not answer.ask:
                continue
            rows = [*answer.ask]
            labels = step.by_arm[rows, 1]  # those of bn_adapt
            known = [LabelledRow(answer.request_id, row, int(label)) for row, label in zip(rows, labels, strict=True)]
            moment = {4: 0.003, 7: 0.008, 10: 0.02}.get(number)
            call = partial(tell, rows=known, number=number)
            reply, _ = interrupted(call, moment) if moment else [call(service.url)] * 2
            told += len(rows)
            assert reply.guard.evidence.labelled == reply.guard.evidence.asked == told
            predicted = torch.cat([step.frozen_logits.argmax(-1, keepdim=True), step.by_arm], dim=1)[rows]
            state = adapter.learn(model.model, state, Labelled(labels, predicted=predicted))
    assert seen == {0, 2}
    with Client(service.url) as client:
        assert list(client.asks("cam")) == []
        exported = State.from_bytes(client.export_state("cam"))
    assert adapter.told(exported) == adapter.told(state)
    assert sum(adapter.told(state)) == told > 10


def tell(url, max_retries=4, *, rows, number):
    """Tell labels under a key of their own."""
    with Client(url, max_retries=max_retries) as client:
        return client.feedback("cam", rows, idempotency_key=f"labels-{number}")
