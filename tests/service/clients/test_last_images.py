"""The last images of clients: kept where the operator allows it, in memory alone, and gone with the client."""

import base64
import gc
import logging
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from acclimate_client import LabelledRow
from acclimate_service.compute.kept_images import MOST_KEPT, KeptImage, images_of, those_kept

BATCHES, ROWS = 3, 10


@pytest.fixture(scope="module")
def keeping(run_service, tmp_path_factory):
    settings = {"adapter": "tent", "ask_budget": 0.2, "keep_images_bytes": 2**20}
    with run_service(data_dir=tmp_path_factory.mktemp("kept"), **settings) as replica:
        yield replica


def images(replica, client):
    reply = replica.http.get(f"/clients/{client}/images")
    assert reply.status_code == 200, reply.text
    return reply.json()["images"]


def pixels(image):
    return np.asarray(Image.open(BytesIO(base64.b64decode(image["png"]))))


def in_memory(request_ids):
    return [each for each in gc.get_objects() if isinstance(each, KeptImage) and each.request_id in request_ids]


def test_by_default_none_are_kept(replica, stream, post):
    post(replica, "unseen", stream(0, 1)[0])
    reply = replica.http.get("/clients/unseen/images")
    assert (reply.status_code, reply.json()["code"]) == (409, "images_off")
    assert replica.service.sessions._sessions["unseen"].memory.held.state.images == ()


def test_they_are_those_that_were_sent_with_what_was_answered_and_asked(keeping, stream):
    batches = stream(0, BATCHES, ROWS)
    with keeping.sdk() as sdk:
        answers = [sdk.predict("cam", batch) for batch in batches]
        found = images(keeping, "cam")
        places = [(answer.request_id, row) for answer in answers for row in range(ROWS)]
        assert [(each["request_id"], each["row"]) for each in found] == places[::-1]
        assert np.array_equal([pixels(each) for each in found[::-1]], np.concatenate(batches)[:, 0])
        assert [each["predicted"] for each in found[::-1]] == [label for each in answers for label in each.labels]
        asked = {(ask.request_id, ask.row) for ask in sdk.asks("cam")}
        assert {(each["request_id"], each["row"]) for each in found if each["asked"]} == asked
        assert asked
        told = places[4]
        sdk.feedback("cam", [LabelledRow(*told, "Coat")])
        labelled = {(each["request_id"], each["row"]): each["label"] for each in images(keeping, "cam")}
        assert labelled.pop(told) == "Coat"
        assert set(labelled.values()) == {None}


def test_numbers_from_0_to_1_are_shown_too(keeping, stream):
    (batch,) = stream(1, 1, 2)
    with keeping.sdk() as sdk:
        sdk.predict("floats", (batch / 255).astype(np.float32))
    assert np.array_equal([pixels(each) for each in images(keeping, "floats")[::-1]], batch[:, 0])


def test_a_batch_that_changes_nothing_leaves_none(keeping, stream, post):
    (batch,) = stream(0, 1)
    post(keeping, "still", batch)
    post(keeping, "still", batch, "?adapt=false")
    assert len(images(keeping, "still")) == len(batch)


@pytest.mark.parametrize(
    "change",
    [
        lambda replica: replica.http.delete("/clients/gone"),
        lambda replica: replica.http.post("/clients/gone/reset"),
        lambda replica: replica.http.put("/clients/gone", json={"adapter": "fedcal"}),
    ],
    ids=["delete", "reset", "configure"],
)
def test_they_go_with_what_was_learned(keeping, stream, change):
    with keeping.sdk() as sdk:
        first = {sdk.predict("gone", batch).request_id for batch in stream(0, 2, ROWS)}
        assert len(in_memory(first)) == 2 * ROWS
        assert change(keeping).status_code in (200, 204)
        assert in_memory(first) == []
        again = sdk.predict("gone", stream(0, 1, ROWS)[0]).request_id
        assert {each["request_id"] for each in images(keeping, "gone")} == {again}


def test_another_replica_that_deletes_the_client_has_them_removed_here(keeping, make_replica, stream, wait_until):
    other = make_replica(redis_url=keeping.service.settings.redis_url, adapter="tent", keep_images_bytes=2**20)
    with keeping.sdk() as sdk:
        sent = {sdk.predict("away", stream(0, 1, ROWS)[0]).request_id}
    assert len(in_memory(sent)) == ROWS
    assert images(other, "away") == []
    assert other.http.delete("/clients/away").status_code == 204
    wait_until(lambda: in_memory(sent) == [])


def test_neither_redis_nor_the_log_has_anything_of_them(keeping, caplog):
    batch = np.random.default_rng(7).integers(0, 256, (2, 28, 28), np.uint8)
    with caplog.at_level(logging.DEBUG), keeping.sdk() as sdk:
        sdk.configure("secret", "fedcal")
        sdk.predict("secret", batch)
        shown = [each["png"] for each in images(keeping, "secret")]
    stored = b"".join(keeping.redis.dump(key) for key in keeping.redis.keys("*"))
    for image, png in zip(batch, shown[::-1], strict=True):
        assert image[10].tobytes() not in stored
        assert png[40:80] not in caplog.text


def test_nobody_has_images_of_a_client_that_is_not_there(keeping, assert_problem):
    assert_problem(keeping.http.get("/clients/nobody/images"), 404, "client_unknown")


def kept(count, asked, budget, size=8):
    every = list(images_of("r", np.zeros((count, 1, 1, size), np.uint8), range(count)))
    return [each.row for each in those_kept(every, {("r", row) for row in asked}, budget)]


@pytest.mark.parametrize(
    ("budget", "rows"),
    [(0, []), (7, []), (8, [3]), (16, [1, 3]), (24, [1, 3, 5]), (32, [1, 3, 4, 5]), (48, [*range(6)])],
)
def test_those_that_are_asked_for_stay_longest_and_then_the_newest(budget, rows):
    assert kept(6, {1, 3}, budget) == rows


def test_there_is_a_bound_however_small_they_are():
    assert kept(MOST_KEPT, (), 2**20) == [*range(MOST_KEPT)]
    assert kept(MOST_KEPT + 1, (), 2**20) == [*range(1, MOST_KEPT + 1)]


def test_what_is_kept_has_memory_of_its_own():
    batch = np.zeros((2, 1, 2, 2), np.uint8)
    first, _ = images_of("r", batch, [0, 0])
    batch += 1
    assert not first.image.any()
    assert first.image.base is None
