"""A covered camera over HTTP: its frames are answered, said to be skipped, counted, and teach the client nothing."""

import re

import numpy as np
import pytest

from acclimate_client import LabelledRow

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


def one_by_one(sdk, client, pictures):
    return [sdk.predict(client, picture[None], probabilities=True) for picture in pictures]


@pytest.mark.parametrize("adapter", ["atp", "fedcal"])
@pytest.mark.parametrize("inline_max", [1, 2**17], ids=["by journal", "whole"])
def test_a_stuck_camera_that_sends_its_picture_in_each_request_teaches_it_once(
    make_replica, serial, stream, adapter, inline_max
):
    first = make_replica(adapter=adapter, inline_max=inline_max)
    second = make_replica(adapter=adapter, inline_max=inline_max, redis_url=first.service.settings.redis_url)
    pictures = stream(3, 1, 4)[0]
    stuck = pictures[[0, 1, 1, 1, 1, 2, 1, 3]]
    with first.sdk() as here, second.sdk(max_retries=50) as there:
        answers = one_by_one(here, "cam", stuck[:3]) + one_by_one(there, "cam", stuck[3:])
        repeats = [answer.state.skipped for answer in answers]
        assert repeats == [False, False, True, True, True, False, False, False]
        assert [answer.signals["skipped"] for answer in answers] == [float(repeat) for repeat in repeats]
        assert [answer.state.version for answer in answers] == list(range(1, 9))
        assert all(answer.state.committed for answer in answers)
    expected = serial.probabilities(adapter, [picture[None] for picture in pictures[[0, 1, 2, 1, 3]]])
    for answer, probabilities in zip([each for each in answers if not each.state.skipped], expected, strict=True):
        np.testing.assert_allclose(answer.probabilities, probabilities, rtol=0, atol=1e-5)


def test_a_picture_is_a_repeat_of_the_one_before_alone_and_in_the_same_form(replica, stream):
    (pictures,) = stream(4, 1, 3)
    one, two = pictures[:1], pictures[1:2]
    floats = one.astype(np.float32) / 255
    with replica.sdk() as sdk:
        sent = [one, np.concatenate((one, two)), one, floats, floats, two, one]
        assert [sdk.predict("forms", each).state.skipped for each in sent] == [False] * 4 + [True] + [False] * 2
        sdk.reset("forms")
        assert not sdk.predict("forms", one).state.skipped


def test_a_repeated_picture_is_remembered_beside_labels_and_after_them(replica, stream):
    (pictures,) = stream(5, 1, 2)
    with replica.sdk() as sdk:
        answer = sdk.predict("told", pictures[:1])
        sdk.feedback("told", [LabelledRow(answer.request_id, 0, 1)])
        assert sdk.predict("told", pictures[:1]).state.skipped
        assert sdk.get("told").guard.evidence.labelled == 1
