"""Small arrays are read on the event loop, large ones in a thread: nobody can tell."""

import io
import threading

import numpy as np
import pytest

from acclimate_service.http import context

LIMIT = 256 * 1024


def raw(array):
    headers = {"X-Tensor-Shape": ",".join(map(str, array.shape)), "X-Tensor-Dtype": array.dtype.name}
    return array.tobytes(), {"Content-Type": "application/octet-stream", **headers}


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue(), {"Content-Type": "application/x-npy"}


@pytest.mark.parametrize("form", [raw, npy])
def test_small_and_large_arrays_of_the_same_images_are_answered_alike(replica, form):
    pixels = np.random.default_rng(3).integers(0, 256, (100, 1, 28, 28), np.uint8)
    small, large = form(pixels), form(np.float32(pixels / 255))
    assert len(small[0]) < LIMIT < len(large[0])
    answers = [
        replica.http.post("/clients/arrays/predict?adapt=false", content=body, headers=headers).json()
        for body, headers in (small, large)
    ]
    first, second = ([row["index"] for row in answer["predictions"]] for answer in answers)
    assert first == second
    assert len(first) == 100


@pytest.mark.parametrize("nbytes", [LIMIT, LIMIT + 1])
def test_the_fingerprint_of_a_large_body_does_not_hold_up_the_event_loop(replica, assert_problem, monkeypatch, nbytes):
    taken, threads = context.fingerprint, []

    def note(secret, *parts):
        if parts:
            threads.append(threading.get_ident())
        return taken(secret, *parts)

    monkeypatch.setattr(context, "fingerprint", note)
    headers = {"Content-Type": "application/octet-stream", "Idempotency-Key": str(nbytes)}
    reply = replica.http.put("/clients/marked/state", content=bytes(nbytes), headers=headers)
    assert_problem(reply, 422, "invalid_state")

    async def loop_thread():
        return threading.get_ident()

    assert (threads == [replica.run(loop_thread())]) == (nbytes <= LIMIT)
    assert len(threads) == 1


def test_a_request_that_cannot_be_repeated_is_not_hashed(replica, monkeypatch):
    monkeypatch.setattr(context, "fingerprint", None)
    body, headers = raw(np.zeros((3, 1, 28, 28), np.uint8))
    assert replica.http.post("/clients/unkeyed/predict", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("number", [3, 200])
def test_a_flaw_is_found_in_small_and_large_arrays(replica, assert_problem, number):
    images = np.zeros((number, 1, 28, 28), np.float32)
    images[-1, 0, 0, 0] = np.nan
    body, headers = raw(images)
    assert (len(body) > LIMIT) == (number == 200)
    reply = replica.http.post("/clients/flawed/predict", content=body, headers=headers)
    assert_problem(reply, 422, "non_finite")
