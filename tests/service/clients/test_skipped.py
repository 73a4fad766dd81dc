"""A covered camera over HTTP: its frames are answered, said to be skipped, counted, and teach the client nothing."""

import re

import numpy as np
import pytest

BLACK = np.zeros((20, 1, 28, 28), np.uint8)


def skipped_rows(replica) -> float:
    (found,) = re.findall(r"^acclimate_skipped_rows_total (\S+)$", replica.http.get("/metrics").text, re.MULTILINE)
    return float(found)


@pytest.mark.parametrize("adapter", ["atp", "fedcal", "tent"])
def test_black_frames_are_answered_and_the_pictures_that_follow_are_answered_as_without_them(replica, stream, adapter):
    first, then = stream(1, 2, 20)
    with replica.sdk() as client:
        for name in ("covered", "spared"):
            client.configure(f"{name}-{adapter}", adapter)
            assert not client.predict(f"{name}-{adapter}", first).state.skipped
        before = skipped_rows(replica)
        covered = client.predict(f"covered-{adapter}", BLACK)
        assert covered.state.skipped
        assert covered.state.committed
        assert covered.signals["skipped"] == 1
        assert len(covered.labels) == 20
        assert skipped_rows(replica) == before + 20
        answers = [client.predict(f"{name}-{adapter}", then, probabilities=True) for name in ("covered", "spared")]
    np.testing.assert_allclose(answers[0].probabilities, answers[1].probabilities, rtol=0, atol=1e-6)


def test_one_black_frame_among_others_is_said_and_counted_and_a_repeat_says_the_same(replica, stream):
    (images,) = stream(2, 1, 10)
    images = images.copy()
    images[3] = 0
    before = skipped_rows(replica)
    call = {"json": {"images": images.tolist(), "layout": "NCHW"}, "headers": {"Idempotency-Key": "one-black-frame"}}
    first = replica.http.post("/clients/blinking/predict", **call).json()
    assert first["state"]["skipped"] is True
    assert first["signals"]["skipped"] == pytest.approx(0.1)
    assert skipped_rows(replica) == before + 1
    again = replica.http.post("/clients/blinking/predict", **call).json()
    assert (again["state"]["replayed"], again["state"]["skipped"]) == ("stored", True)


def test_reply_to_pictures_says_nothing_of_skipping(replica, stream):
    (images,) = stream(2, 1, 10)
    state = replica.http.post("/clients/seeing/predict", json={"images": images.tolist(), "layout": "NCHW"}).json()[
        "state"
    ]
    assert "skipped" not in state
