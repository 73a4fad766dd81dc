"""The service is killed, in the middle of streams and of requests; nothing is lost and nothing applied twice."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from acclimate_client import Client, ConnectionFailed
from acclimate_client.errors import KeyReusedError


def test_a_stream_goes_on_after_kills_as_if_there_had_been_none(serve, stream, serial):
    """Kills between batches and at moments of a batch: while it is sent, computed, committed or answered."""
    batches = stream(0, 12)
    moments = {3: None, 5: 0.005, 7: 0.015, 9: 0.035}  # seconds after the batch was sent; None: before
    answers, replays = [], []
    service = serve()
    with ThreadPoolExecutor(1) as pool:
        for number, images in enumerate(batches):
            if number in moments:
                interrupted = pool.submit(send, service.url, images, number, 0) if moments[number] is not None else None
                time.sleep(moments[number] or 0)
                service.kill()
                if interrupted is not None:
                    assert interrupted.exception() is None or isinstance(interrupted.exception(), ConnectionFailed)
                service = serve()
                check_repeat(service.url, batches, number - 1, answers[-1])
            prediction = send(service.url, images, number)
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
    again = send(url, batches[number], number)
    assert again.state.version == number + 1
    assert again.state.replayed in ("stored", "recomputed")
    assert np.allclose(again.probabilities, answer, rtol=0, atol=1e-5)
    with pytest.raises(KeyReusedError):
        send(url, batches[number + 1], number)


def send(url, images, number, max_retries=4):
    """Send one batch under a key of its own.

    The answers of a journal are stored just after the reply. Where the kill came first, the killed replica may still be
    computing it as far as anybody knows: until its lease ends, `request_running` asks for another try.
    """
    with Client(url, max_retries=max_retries) as client:
        return client.predict("cam", images, probabilities=True, idempotency_key=f"batch-{number}")
