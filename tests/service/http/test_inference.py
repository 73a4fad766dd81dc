"""The Open Inference Protocol, spoken by an unmodified client of Triton and by hand."""

import base64
import io
import json
import struct

import numpy as np
import pytest
from PIL import Image

MODEL = "fashion-cnn"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def triton(module):
    return module("tritonclient.http")


@pytest.fixture
def client(triton, replica):
    with triton.InferenceServerClient(replica.url.removeprefix("http://")) as client:
        yield client


@pytest.fixture
def images(stream):
    return stream(0, 1, 3)[0]


def files(images, kind="PNG"):
    buffers = [io.BytesIO() for _ in images]
    for pixels, buffer in zip(images, buffers, strict=True):
        Image.fromarray(pixels[0]).save(buffer, kind)
    return np.array([buffer.getvalue() for buffer in buffers], dtype=object)


def tensor(triton, values, *, binary=True):
    datatype = {"uint8": "UINT8", "float32": "FP32", "object": "BYTES"}[values.dtype.name]
    made = triton.InferInput("images", list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


def outputs(triton, *names, binary):
    return [triton.InferRequestedOutput(name, binary_data=binary) for name in names]


def ask(replica, document, **headers):
    return replica.http.post(f"/v2/models/{MODEL}/infer", json=document, headers=headers)


def numbers(images, /, **members):
    given = {"name": "images", "shape": list(images.shape), "datatype": "UINT8", "data": images.ravel().tolist()}
    return {"inputs": [{**given, **members.pop("input", {})}], **members}


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("kind", ["UINT8", "NHWC", "FP32", "BYTES"])
def test_every_tensor_gets_the_answer_of_our_own_route_both_ways(triton, client, serial, images, kind, binary, replica):
    values = {
        "UINT8": images,
        "NHWC": images.transpose(0, 2, 3, 1).copy(),
        "FP32": (images / 255).astype(np.float32),
        "BYTES": files(images),
    }[kind]
    if kind == "BYTES" and not binary:  # the client takes these strings for text, and JSON has no other
        values = np.array([base64.b64encode(each).decode() for each in values], dtype=object)
    wanted = outputs(triton, "probabilities", "logits", "labels", "signals", binary=binary)
    given = client.infer(
        MODEL,
        [tensor(triton, values, binary=binary)],
        outputs=wanted,
        parameters={"client_id": f"oip-{kind}-{binary}"},
    )
    (expected,) = serial.probabilities("atp", [images])
    probabilities = given.as_numpy("probabilities")
    assert probabilities.dtype == np.float32
    assert np.allclose(probabilities, expected, rtol=0, atol=1e-5)
    logits = given.as_numpy("logits").astype(np.float64)
    assert np.allclose(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), expected, rtol=0, atol=1e-5)
    classes = serial.bundle.manifest.classes
    labels = [each.decode() if isinstance(each, bytes) else each for each in given.as_numpy("labels")]
    assert labels == [classes[index] for index in expected.argmax(axis=1)]
    assert "entropy" in json.loads(given.as_numpy("signals")[0])
    parameters = given.get_response()["parameters"]
    assert (parameters["state_version"], parameters["state_committed"], parameters["adapter"]) == (1, True, "atp")


def test_without_a_client_the_global_model_answers_and_nothing_is_kept(triton, client, replica, serial, images):
    keys = set(replica.redis.keys())
    given = client.infer(MODEL, [tensor(triton, images)])
    assert set(replica.redis.keys()) <= keys
    (expected,) = serial.probabilities("none", [images])
    assert np.allclose(given.as_numpy("probabilities"), expected, rtol=0, atol=1e-5)
    parameters = given.get_response()["parameters"]
    assert (parameters["state_status"], parameters["state_committed"]) == ("frozen", False)
    assert "client_id" not in parameters


def test_a_request_id_is_applied_once_by_whatever_way_it_is_repeated(triton, client, replica, images, stream):
    def infer(values, **more):
        return client.infer(
            MODEL, [tensor(triton, values)], request_id="7", parameters={"client_id": "oip-once"}, **more
        )

    first, again = infer(images), infer(images)
    replayed = again.get_response()["parameters"]
    assert (replayed["state_version"], replayed["state_replayed"]) == (1, "stored")
    assert again.get_response()["id"] == "7"
    for name in ("logits", "probabilities"):
        assert np.array_equal(first.as_numpy(name), again.as_numpy(name))
    with pytest.raises(triton_error(triton), match="key"):
        infer(stream(0, 2, 3)[1])
    assert replica.http.get("/clients/oip-once").json()["state"]["version"] == 1


def triton_error(triton):
    return triton.InferenceServerException


def test_it_adapts_to_the_same_client_as_our_own_route(triton, client, replica, post, serial, stream):
    first, second = stream(1, 2, 4)
    assert post(replica, "oip-mixed", first).json()["state"]["version"] == 1
    given = client.infer(MODEL, [tensor(triton, second)], parameters={"client_id": "oip-mixed"})
    assert given.get_response()["parameters"]["state_version"] == 2
    assert np.allclose(
        given.as_numpy("probabilities"), serial.probabilities("atp", [first, second])[1], rtol=0, atol=1e-5
    )


def test_a_look_changes_nothing(triton, client, replica, images):
    for _ in range(2):
        given = client.infer(
            MODEL, [tensor(triton, images)], request_id="a", parameters={"client_id": "oip-look", "adapt": False}
        )
        assert given.get_response()["parameters"]["state_committed"] is False
    assert replica.http.get("/clients/oip-look").status_code == 404


def test_rows_can_be_told_their_labels(triton, client, replica, images):
    given = client.infer(MODEL, [tensor(triton, images)], parameters={"client_id": "oip-told"})
    rows = [{"request_id": given.get_response()["parameters"]["request_id"], "row": 0, "label": 3}]
    told = replica.http.post("/clients/oip-told/feedback", json={"rows": rows})
    assert told.json()["feedback"]["counted"] == 1


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_bodies_may_be_packed(triton, client, images, algorithm):
    given = client.infer(MODEL, [tensor(triton, images)], request_compression_algorithm=algorithm)
    assert given.as_numpy("logits").shape == (3, 10)


def test_the_service_and_its_models_are_described(client, replica):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "acclimate"
    metadata = client.get_model_metadata(MODEL)
    assert metadata == client.get_model_metadata(MODEL, "1")
    assert metadata["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, 1, 28, 28]}]
    assert [each["name"] for each in metadata["outputs"]] == ["logits", "probabilities", "labels", "signals"]
    config = client.get_model_config(MODEL, "1")
    assert [each["data_type"] for each in config["input"]] == ["TYPE_UINT8"]
    assert {each["data_type"] for each in config["output"]} == {"TYPE_FP32", "TYPE_STRING"}
    assert client.get_model_repository_index() == [{"name": MODEL, "version": "1", "state": "READY"}]


def test_requests_are_counted(triton, client, images):
    def counts():
        (found,) = client.get_inference_statistics(MODEL)["model_stats"]
        assert client.get_inference_statistics()["model_stats"] == [found]
        kinds = found["inference_stats"]
        return found["inference_count"], kinds["success"]["count"], kinds["fail"]["count"]

    rows, answered, refused = counts()
    client.infer(MODEL, [tensor(triton, images)])
    with pytest.raises(triton_error(triton)):
        client.infer(MODEL, [tensor(triton, images[:, :, :5])])
    assert counts() == (rows + 3, answered + 1, refused + 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.get_system_shared_memory_status(),
        lambda client: client.register_system_shared_memory("a", "/a", 8),
        lambda client: client.get_cuda_shared_memory_status(),
        lambda client: client.get_trace_settings(),
        lambda client: client.update_trace_settings(MODEL, {"trace_rate": "1"}),
        lambda client: client.get_log_settings(),
        lambda client: client.load_model(MODEL, config="{}"),
    ],
)
def test_what_is_not_spoken_says_so(triton, client, call):
    with pytest.raises(triton_error(triton), match="not supported"):
        call(client)


@pytest.mark.parametrize("setting", [{"sequence_id": 7, "sequence_start": True}, {"priority": 1}])
def test_parameters_of_other_extensions_are_refused(triton, client, images, setting):
    with pytest.raises(triton_error(triton), match="not supported"):
        client.infer(MODEL, [tensor(triton, images)], **setting)


def test_a_deadline_in_microseconds_is_kept(triton, client, images):
    with pytest.raises(triton_error(triton), match="deadline"):
        client.infer(MODEL, [tensor(triton, images)], timeout=1)
    with pytest.raises(triton_error(triton), match="deadline"):
        client.infer(MODEL, [tensor(triton, images)], timeout=1, parameters={"client_id": "oip-late"})


async def test_the_asynchronous_client_gets_the_same(triton, module, replica, serial, images):
    async with module("tritonclient.http.aio").InferenceServerClient(replica.url.removeprefix("http://")) as client:
        assert await client.is_model_ready(MODEL)
        given = await client.infer(MODEL, [tensor(triton, files(images))], parameters={"client_id": "oip-async"})
    (expected,) = serial.probabilities("atp", [images])
    assert np.allclose(given.as_numpy("probabilities"), expected, rtol=0, atol=1e-5)


IMAGES = np.full((2, 1, 28, 28), 90, np.uint8)
REFUSED = {
    "no object": ([], "invalid_request"),
    "no inputs": ({}, "invalid_request"),
    "two inputs": ({"inputs": numbers(IMAGES)["inputs"] * 2}, "invalid_request"),
    "unknown member": (numbers(IMAGES, images=[]), "invalid_request"),
    "unknown parameter": (numbers(IMAGES, parameters={"client": "a"}), "invalid_request"),
    "client id that is none": (numbers(IMAGES, parameters={"client_id": "a/b"}), "invalid_client_id"),
    "client id of another type": (numbers(IMAGES, parameters={"client_id": 7}), "invalid_request"),
    "nobody adapts": (numbers(IMAGES, parameters={"adapt": True}), "invalid_request"),
    "negative timeout": (numbers(IMAGES, parameters={"timeout": -1}), "invalid_request"),
    "id of another type": (numbers(IMAGES, id=7), "invalid_request"),
    "id that is no key": (numbers(IMAGES, id="\u00fc", parameters={"client_id": "oip-bad"}), "invalid_request"),
    "other name": (numbers(IMAGES, input={"name": "input"}), "invalid_request"),
    "datatype": (numbers(IMAGES, input={"datatype": "FP64"}), "wrong_dtype"),
    "no shape": (numbers(IMAGES, input={"shape": []}), "invalid_request"),
    "negative shape": (numbers(IMAGES, input={"shape": [-1, 1, 28, 28]}), "invalid_request"),
    "huge shape": (numbers(IMAGES, input={"shape": [2**31 - 1] * 9}), "wrong_shape"),
    "fewer numbers": (numbers(IMAGES, input={"data": [1]}), "wrong_shape"),
    "number too large": (numbers(IMAGES, input={"data": [256] * IMAGES.size}), "out_of_range"),
    "text": (numbers(IMAGES, input={"data": ["a"] * IMAGES.size}), "wrong_dtype"),
    "other size": (numbers(np.zeros((2, 1, 5, 5), np.uint8)), "wrong_shape"),
    "no images": (numbers(IMAGES[:0]), "empty_batch"),
    "too many": (numbers(IMAGES, input={"shape": [257], "datatype": "BYTES", "data": ["a"] * 257}), "too_many_images"),
    "files by rows": (numbers(IMAGES, input={"shape": [1, 2], "datatype": "BYTES", "data": ["a"]}), "wrong_shape"),
    "no file": (numbers(IMAGES, input={"shape": [1], "datatype": "BYTES", "data": ["AAAA"]}), "undecodable_image"),
    "files missing": (numbers(IMAGES, input={"shape": [2], "datatype": "BYTES", "data": ["AAAA"]}), "wrong_shape"),
    "layout": (numbers(IMAGES, input={"parameters": {"layout": "HWC"}}), "invalid_request"),
    "data twice": (numbers(IMAGES, input={"parameters": {"binary_data_size": 4}}), "invalid_request"),
    "unknown output": (numbers(IMAGES, outputs=[{"name": "scores"}]), "invalid_request"),
    "output twice": (numbers(IMAGES, outputs=[{"name": "labels"}] * 2), "invalid_request"),
    "classification": (
        numbers(IMAGES, outputs=[{"name": "labels", "parameters": {"classification": 3}}]),
        "unsupported",
    ),
    "shared memory": (numbers(IMAGES, input={"parameters": {"shared_memory_region": "a"}}), "unsupported"),
}


@pytest.mark.parametrize(("document", "code"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_said(replica, document, code):
    reply = ask(replica, document)
    assert (reply.json()["code"], reply.json()["state_committed"]) == (code, False), reply.text
    assert 400 <= reply.status_code < 500
    assert reply.json()["error"] == reply.json()["detail"]


BINARY = {"inputs": [{"name": "images", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 12}}]}
FRAMES = {
    "header of nothing": ("0", b"", "malformed_body"),
    "header beyond the body": ("100000", b"", "malformed_body"),
    "negative header": ("-1", b"", "invalid_request"),
    "huge header": ("9" * 30, b"", "invalid_request"),
    "no bytes": (None, b"", "malformed_body"),
    "more bytes": (None, bytes(13), "malformed_body"),
    "file beyond its end": (None, struct.pack("<I", 2**32 - 1) + bytes(8), "malformed_body"),
    "cut length": (None, struct.pack("<I", 5) + bytes(5) + bytes(3), "wrong_shape"),
    "two files of one": (None, (struct.pack("<I", 2) + b"ab") * 2, "wrong_shape"),
    "no image": (None, struct.pack("<I", 8) + b"\x89PNG\r\n\x1a\n", "undecodable_image"),
}


@pytest.mark.parametrize(("header", "rest", "code"), FRAMES.values(), ids=FRAMES)
def test_frames_that_contradict_themselves_are_refused(replica, header, rest, code):
    head = json.dumps(BINARY).encode()
    reply = replica.http.post(
        f"/v2/models/{MODEL}/infer",
        content=head + rest,
        headers={"Inference-Header-Content-Length": header or str(len(head))},
    )
    assert reply.json()["code"] == code, reply.text
    assert 400 <= reply.status_code < 500


def test_a_key_in_two_places_is_refused(replica):
    reply = ask(replica, numbers(IMAGES, parameters={"client_id": "oip-keys"}), **{"Idempotency-Key": "k"})
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")


@pytest.mark.parametrize("path", ["other/infer", f"{MODEL}/versions/2/infer", "other"])
def test_other_models_and_versions_are_not_there(replica, path):
    reply = replica.http.request("POST" if path.endswith("infer") else "GET", f"/v2/models/{path}")
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")
    assert f"{MODEL} 1" in reply.json()["detail"]


def test_who_names_its_client_in_the_body_takes_room_from_no_other(make_replica, gate, pool, images):
    """With room for nine requests, a flooding client leaves some to another one at the same address."""
    gate.shut = False
    replica = make_replica(adapter="gated", max_waiting=9)
    gate.shut = True
    shades = numbers(images)

    def send(client):
        return ask(replica, {**shades, "parameters": {"client_id": client}}).status_code

    first = pool.submit(send, "flood")
    gate.wait_for_a_step()
    more = [pool.submit(send, "flood") for _ in range(7)]
    replica.await_waiting(8)
    assert send("flood") == 429
    other = pool.submit(send, "calm")
    replica.await_waiting(9)
    gate.open()
    assert {first.result(), other.result(), *(each.result() for each in more)} == {200}
