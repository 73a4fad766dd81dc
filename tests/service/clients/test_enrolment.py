"""Labelled images make a personal head."""

import base64
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from acclimate_adapters import create, guarded_step
from acclimate_client.errors import (
    EnrolmentUnsupportedError,
    InvalidLabelsError,
    KeyReusedError,
    WrongShapeError,
)

CLASSES = 10


@pytest.fixture(scope="module")
def sdk(replica):
    with replica.sdk() as client:
        yield client


def oracle(bundle, name, images, labels, batch, **hyperparameters):
    """What an enrolled client answers in process."""
    adapter = create(name, **hyperparameters)
    weights = adapter if "+" not in name else adapter.weights
    assert weights.enrols
    state = adapter.init(bundle.model, x=bundle.prepare(images), labels=torch.from_numpy(labels))
    step = guarded_step(adapter, bundle.model, state, bundle.prepare(batch))
    return step.logits.double().softmax(dim=-1).numpy()


def png(image):
    buffer = io.BytesIO()
    Image.fromarray(image[0]).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["fedthe", "fedthe_plus", "fedthe+em"])
def test_an_enrolled_client_is_answered_by_its_personal_head(sdk, serial, labelled, stream, name):
    client_id = f"enrolled-{name}".replace("+", ".")
    images, labels = labelled(3, 40)
    (batch,) = stream(4, 1, 4)
    sdk.configure(client_id, name)
    before = sdk.predict(client_id, batch, probabilities=True, adapt=False)
    assert before.signals["enrolled"] == 0
    result = sdk.enroll(client_id, images, labels, layout="NCHW")
    assert (result.adapter, result.enrolled) == (name, 40)
    assert (result.state.version, result.state.committed, result.state.replayed) == (2, True, "none")
    after = sdk.predict(client_id, batch, probabilities=True)
    assert after.signals["enrolled"] == 1
    assert after.state.version == 3
    expected = oracle(serial.bundle, name, images, labels, batch)
    assert np.allclose(after.probabilities, expected, rtol=0, atol=1e-5)
    assert not np.allclose(after.probabilities, before.probabilities, rtol=0, atol=1e-3)


def test_an_enrolment_survives_a_restart(make_replica, serial, labelled, stream):
    images, labels = labelled(3, 20)
    (batch,) = stream(3, 1)
    first = make_replica(adapter="fedthe")
    with first.sdk() as sdk:
        assert sdk.enroll("cam", images, labels).state.status == "cold"
    second = make_replica(adapter="fedthe", redis_url=first.service.settings.redis_url)
    with second.sdk() as sdk:
        prediction = sdk.predict("cam", batch, probabilities=True)
    assert (prediction.state.version, prediction.state.status) == (2, "restored")
    expected = oracle(serial.bundle, "fedthe", images, labels, batch)
    assert np.allclose(prediction.probabilities, expected, rtol=0, atol=1e-5)


def test_a_repeated_enrolment_gets_the_first_answer_and_is_not_applied_again(replica, sdk, labelled, stream):
    images, labels = labelled(1, 12)
    sdk.configure("once", "fedthe")
    first = sdk.enroll("once", images, labels, idempotency_key="k")
    sdk.predict("once", stream(1, 1)[0])
    kept = replica.keys("once")
    again = sdk.enroll("once", images, labels, idempotency_key="k")
    assert (again.enrolled, again.state.version, again.state.replayed) == (12, first.state.version, "stored")
    assert replica.keys("once") == kept
    with pytest.raises(KeyReusedError):
        sdk.enroll("once", images, labels[::-1].copy(), idempotency_key="k")
    with pytest.raises(KeyReusedError):
        sdk.predict("once", images, idempotency_key="k")


def test_concurrent_copies_of_an_enrolment_are_applied_once(replica, sdk, labelled, pool):
    images, labels = labelled(1, 30)
    sdk.configure("copies", "fedthe")

    def send(_):
        with replica.sdk(max_retries=20) as own:
            return own.enroll("copies", images, labels, idempotency_key="k")

    versions = {result.state.version for result in pool.map(send, range(6))}
    assert versions == {2}
    assert sdk.get("copies").state.version == 2


@pytest.mark.parametrize("body", ["json", "base64", "form", "npy", "png"])
def test_labels_go_with_images_in_every_encoding(replica, sdk, serial, labelled, stream, body):
    images, labels = labelled(2, 1 if body == "png" else 6)
    names = [serial.bundle.manifest.classes[label] if label % 2 else int(label) for label in labels]
    if body == "json":
        send = {"json": {"images": images.tolist(), "layout": "NCHW", "labels": names}}
    elif body == "base64":
        send = {"json": {"images": [base64.b64encode(png(image)).decode() for image in images], "labels": names}}
    elif body == "form":
        files = [("image", (f"{i}.png", png(image), "image/png")) for i, image in enumerate(images)]
        send = {"files": files, "data": {"labels": json.dumps(names)}}
    elif body == "npy":
        buffer = io.BytesIO()
        np.save(buffer, images)
        headers = {"Content-Type": "application/x-npy", "X-Labels": json.dumps(names)}
        send = {"content": buffer.getvalue(), "headers": headers}
    else:
        send = {"content": png(images[0]), "headers": {"Content-Type": "image/png", "X-Labels": json.dumps(names)}}
    client_id = f"encoded-{body}"
    sdk.configure(client_id, "fedthe")
    reply = replica.http.post(f"/clients/{client_id}/enroll", **send)
    assert reply.status_code == 200, reply.text
    assert set(reply.json()) == {"client_id", "model", "adapter", "enrolled", "state", "request_id"}
    (batch,) = stream(4, 1)
    answer = sdk.predict(client_id, batch, probabilities=True).probabilities
    expected = oracle(serial.bundle, "fedthe", images, labels, batch)
    assert np.allclose(answer, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["none", "atp", "atp+em"])
def test_an_adapter_that_takes_no_enrolment_says_so(replica, sdk, labelled, name):
    client_id = f"unsupported-{name}".replace("+", ".")
    images, labels = labelled(0, 4)
    sdk.configure(client_id, name)
    before = replica.keys(client_id)
    with pytest.raises(EnrolmentUnsupportedError, match="takes no labelled images"):
        sdk.enroll(client_id, images, labels)
    assert replica.keys(client_id) == before


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (None, "there are no labels"),
        ("3", "there are no labels"),
        ("[0, 1", "not valid JSON"),
        ('{"0": 1}', "there are no labels"),
        ("[0]", "1 labels for 2 images"),
        ("[0, 1, 2]", "3 labels for 2 images"),
        ("[0, 10]", "accepted are 0 to 9"),
        ("[0, -1]", "accepted are 0 to 9"),
        ("[0, 1.0]", "accepted are 0 to 9"),
        ("[0, true]", "accepted are 0 to 9"),
        ("[0, null]", "accepted are 0 to 9"),
        ('[0, "coat"]', "Coat"),
        ("[0, [1]]", "accepted are 0 to 9"),
    ],
)
def test_wrong_labels_are_422_with_what_is_accepted_and_change_nothing(replica, assert_problem, labels, says):
    headers = {"Content-Type": "application/octet-stream", "X-Tensor-Shape": "2,28,28"}
    if labels is not None:
        headers["X-Labels"] = labels
    reply = replica.http.post("/clients/mislabelled/enroll", content=bytes(2 * 28 * 28), headers=headers)
    assert says in assert_problem(reply, 422, "invalid_labels")["detail"]
    assert replica.keys("mislabelled") == {}


@pytest.mark.parametrize("labels", [None, "[0, 1]", "[0"])
def test_wrong_labels_in_a_form_are_422_too(replica, assert_problem, labelled, labels):
    images, _ = labelled(0, 1)
    files = [("image", ("0.png", png(images[0]), "image/png"))]
    reply = replica.http.post("/clients/x/enroll", files=files, data={} if labels is None else {"labels": labels})
    assert_problem(reply, 422, "invalid_labels")


def test_labels_in_a_form_twice_are_422(replica, assert_problem, labelled):
    images, _ = labelled(0, 1)
    files = [("image", ("0.png", png(images[0]), "image/png")), ("labels", (None, "[0]")), ("labels", (None, "[1]"))]
    assert_problem(replica.http.post("/clients/x/enroll", files=files), 422, "invalid_request")


def test_a_full_form_of_images_leaves_room_for_the_labels(make_replica, labelled):
    replica = make_replica(max_images=4, adapter="fedthe")
    images, labels = labelled(0, 5)
    with replica.sdk() as sdk:
        assert sdk.enroll("cam", [png(image) for image in images[:4]], labels[:4]).enrolled == 4
        with pytest.raises(Exception, match="too_many_images"):
            sdk.enroll("cam", [png(image) for image in images], labels)


def test_predict_takes_no_labels(replica, assert_problem):
    reply = replica.http.post("/clients/x/predict", json={"images": [[[0.5]]], "labels": [1]})
    assert "unknown field 'labels'" in assert_problem(reply, 422, "invalid_request")["detail"]


def test_bad_images_are_refused_as_in_predict(replica, sdk):
    with pytest.raises(WrongShapeError):
        sdk.enroll("misfit", np.zeros((2, 9, 9), np.uint8), [0, 1])
    with pytest.raises(InvalidLabelsError):
        sdk.enroll("misfit", np.zeros((2, 28, 28), np.uint8), [0, CLASSES])
    assert replica.keys("misfit") == {}
