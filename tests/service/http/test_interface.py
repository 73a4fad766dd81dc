"""Encodings in, documents out: the interface beside the life of a client."""

import io

import numpy as np
import pytest
from PIL import Image

from acclimate_adapters import create


@pytest.fixture
def sdk(replica):
    with replica.sdk() as client:
        yield client


@pytest.mark.parametrize("body", ["numbers", "npy", "png", "form"])
def test_the_same_images_get_the_same_answer_in_every_encoding(replica, stream, body, serial):
    images = stream(0, 1, 3)[0]

    def png(pixels):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        return buffer.getvalue()

    if body == "numbers":
        send = {"json": {"images": images.tolist(), "layout": "NCHW"}}
    elif body == "npy":
        buffer = io.BytesIO()
        np.save(buffer, images)
        send = {"content": buffer.getvalue(), "headers": {"Content-Type": "application/x-npy"}}
    elif body == "form":
        send = {"files": [("image", (f"{i}.png", png(pixels[0]), "image/png")) for i, pixels in enumerate(images)]}
    else:
        images = images[:1]
        send = {"content": png(images[0, 0]), "headers": {"Content-Type": "image/png"}}
    reply = replica.http.post(f"/clients/encoding-{body}/predict?probabilities=true", **send)
    assert reply.status_code == 200, reply.text
    answer = np.array(reply.json()["probabilities"])
    assert np.allclose(answer, serial.probabilities("atp", [images])[0], rtol=0, atol=1e-5)


def test_the_models_are_described(replica, sdk):
    (model,) = sdk.models()
    assert (model.name, model.version, model.default, len(model.classes)) == ("fashion-cnn", "1", True, 10)
    assert (model.input.channels, model.input.height, model.input.width) == (1, 28, 28)
    assert model.adapters["atp"].available
    assert create("atp").needs.isdisjoint(model.adapters["atp"].missing)


def test_the_metrics_do_not_grow_with_the_clients_and_name_none(replica, sdk, stream):
    (images,) = stream(0, 1, 1)
    sdk.predict("metered-0", images)
    replica.http.get("/metrics")  # from now on the route itself is counted
    before = replica.http.get("/metrics").text
    for number in range(1, 200):
        sdk.predict(f"metered-{number}", images, adapt=False)
    after = replica.http.get("/metrics").text
    assert len(after.splitlines()) == len(before.splitlines())
    assert "metered" not in after
    assert "acclimate_ready 1.0" in after


def test_the_openapi_document_names_every_route_and_the_form_of_errors(replica):
    document = replica.http.get("/openapi.json").json()
    assert set(document["paths"]) >= {
        "/clients/{client_id}",
        "/clients/{client_id}/predict",
        "/clients/{client_id}/reset",
        "/metrics",
        "/models",
        "/v2/health/live",
        "/v2/health/ready",
    }
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"], "the framework's own form of errors is never sent"
            assert "application/problem+json" in operation["responses"]["default"]["content"]


def test_replies_carry_no_more_than_the_documented_fields(replica, post, stream):
    reply = post(replica, "plain", stream(0, 1)[0][:, 0])
    documented = {"client_id", "model", "adapter", "predictions", "state", "signals", "request_id"}
    assert set(reply.json()) - {"ask"} == documented  # which is there where a row is worth a label
