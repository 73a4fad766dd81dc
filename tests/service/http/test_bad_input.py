"""What must not be accepted: refused with a reason, the client's state unchanged, the service alive."""

import base64
import io
import os
import socket
import struct
import zlib
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import orjson
import pytest
from PIL import Image

GREY = np.full((28, 28), 90, np.uint8)
RAW = {"Content-Type": "application/octet-stream"}
JSON = {"Content-Type": "application/json"}
NPY = {"Content-Type": "application/x-npy"}


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def image(kind, size=(28, 28), mode="L"):
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, kind)
    return buffer.getvalue()


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def huge_png(width, height):
    """A valid header of an enormous image in some hundred bytes."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(100_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def numbers(images, **fields):
    return orjson.dumps({"images": images, **fields})


class Bomb:
    """A pickle that leaves a file behind when it is loaded."""

    trace = Path("/tmp") / f"acclimate-pickle-{os.getpid()}"

    def __reduce__(self):
        return (os.mkdir, (str(self.trace),))


FLOATS = np.full((2, 28, 28, 1), 0.5, np.float32)
BODIES = {
    "an empty batch of numbers": (numbers([]), JSON, 422, "empty_batch"),
    "an empty raw batch": (b"", {**RAW, "X-Tensor-Shape": "0,28,28,1"}, 422, "empty_batch"),
    "an empty npy batch": (npy(np.empty((0, 28, 28), np.uint8)), NPY, 422, "empty_batch"),
    "an image of another size": (npy(np.zeros((2, 32, 32), np.uint8)), NPY, 422, "wrong_shape"),
    "too many channels": (npy(np.zeros((2, 28, 28, 3), np.uint8)), NPY, 422, "wrong_shape"),
    "a single image without batch axis": (npy(GREY), NPY, 422, "wrong_shape"),
    "an encoded image of another size": (image("PNG", (32, 32)), {"Content-Type": "image/png"}, 422, "wrong_shape"),
    "floats up to 255": (npy(FLOATS * 510), NPY, 422, "out_of_range"),
    "floats below 0": (npy(-FLOATS), NPY, 422, "out_of_range"),
    "integers above 255": (numbers([(GREY.astype(int) + 200).tolist()]), JSON, 422, "out_of_range"),
    "int32": (npy(np.zeros((2, 28, 28), np.int32)), NPY, 422, "wrong_dtype"),
    "NaN": (npy(FLOATS * np.nan), NPY, 422, "non_finite"),
    "infinity": (npy(FLOATS * np.inf), NPY, 422, "non_finite"),
    "zeros and ones without dtype": (numbers([(GREY > 0).astype(int).tolist()]), JSON, 422, "ambiguous_dtype"),
    "a 30000 x 30000 PNG": (huge_png(30_000, 30_000), {"Content-Type": "image/png"}, 422, "too_many_pixels"),
    "a truncated JPEG": (image("JPEG")[:-200], {"Content-Type": "image/jpeg"}, 422, "undecodable_image"),
    "text that is no image": (b"not an image", {"Content-Type": "image/png"}, 422, "undecodable_image"),
    "base64 of junk": (numbers([base64.b64encode(b"junk").decode()]), JSON, 422, "undecodable_image"),
    "a pickle in an npy": (npy(np.array([Bomb()], dtype=object)), NPY, 422, "wrong_dtype"),
    "malformed JSON": (b'{"images": [', JSON, 400, "malformed_body"),
    "JSON nested too deep": (b"[" * 100_000, JSON, 400, "malformed_body"),
    "JSON of two million lists": (b'{"images":[' + b"[]," * 999_999 + b"[]]}", JSON, 413, "body_too_large"),
    "JSON of two million numbers": (numbers([[0] * 2_000_000]), JSON, 413, "body_too_large"),
    "JSON that is no object": (b"[1, 2]", JSON, 422, "invalid_request"),
    "an unknown JSON field": (numbers([GREY.tolist()], model="x"), JSON, 422, "invalid_request"),
    "no body": (b"", JSON, 400, "malformed_body"),
    "an unknown content type": (b"<x/>", {"Content-Type": "text/xml"}, 415, "unsupported_media_type"),
    "no content type": (b"x", {}, 415, "unsupported_media_type"),
    "multipart without boundary": (b"x", {"Content-Type": "multipart/form-data"}, 400, "malformed_body"),
    "a raw tensor without shape": (GREY.tobytes(), RAW, 422, "invalid_request"),
    "a shape of words": (GREY.tobytes(), {**RAW, "X-Tensor-Shape": "a,b,c"}, 422, "invalid_request"),
    "a negative shape": (GREY.tobytes(), {**RAW, "X-Tensor-Shape": "-1,28,28"}, 422, "invalid_request"),
    "a shape that overflows": (b"", {**RAW, "X-Tensor-Shape": ",".join(["4294967296"] * 4)}, 422, None),
    "an unknown raw dtype": (GREY.tobytes(), {**RAW, "X-Tensor-Shape": "1,28,28", "X-Tensor-Dtype": "i4"}, 422, None),
    "an unknown layout": (GREY.tobytes(), {**RAW, "X-Tensor-Shape": "1,28,28", "X-Tensor-Layout": "Q"}, 422, None),
    "too many images": (npy(np.zeros((257, 28, 28), np.uint8)), NPY, 413, "too_many_images"),
}
HEADERS = {
    "a blank idempotency key": {"Idempotency-Key": ""},
    "a long idempotency key": {"Idempotency-Key": "k" * 256},
    "a key beyond ASCII": {b"Idempotency-Key": "schlüssel".encode("latin-1")},
    "a timeout in words": {"X-Request-Timeout-Ms": "soon"},
    "a timeout of 0": {"X-Request-Timeout-Ms": "0"},
    "a negative timeout": {"X-Request-Timeout-Ms": "-5"},
    "a timeout above 10 minutes": {"X-Request-Timeout-Ms": "600001"},
    "a timeout of 5000 digits": {"X-Request-Timeout-Ms": "9" * 5000},
}


def lasting_keys(replica):
    """The keys of the client but for the lease on its journal, which ends by itself."""
    return {key: value for key, value in replica.keys("steady").items() if not key.endswith(b":l")}


@pytest.fixture(scope="module")
def steady(replica, post):
    """A client with a state that nothing below may change."""
    assert post(replica, "steady", GREY[None], Idempotency_Key="first").status_code == 200
    return lasting_keys(replica)


@pytest.fixture
def unharmed(replica, steady):
    """Check afterwards that the client is what it was and that the service answers."""
    yield
    assert replica.http.get("/clients/steady").json()["state"]["version"] == 1
    assert lasting_keys(replica) == steady
    assert replica.http.get("/v2/health/live").json() == {"live": True}


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_is_refused(replica, assert_problem, name):
    body, headers, status, code = BODIES[name]
    reply = replica.http.post("/clients/steady/predict", content=body, headers=headers)
    problem = assert_problem(reply, status, code or reply.json()["code"])
    assert problem["retryable"] is False


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("name", HEADERS)
def test_a_bad_header_is_refused(replica, assert_problem, name):
    headers = {**RAW, "X-Tensor-Shape": "1,28,28", **HEADERS[name]}
    reply = replica.http.post("/clients/steady/predict", content=GREY.tobytes(), headers=list(headers.items()))
    assert_problem(reply, 422, "invalid_request")


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("query", ["adapt=maybe", "probabilities=2", "adapt="])
def test_a_bad_parameter_is_refused(replica, post, assert_problem, query):
    assert_problem(post(replica, "steady", GREY[None], f"?{query}"), 422, "invalid_request")


def test_a_pickle_was_not_loaded(replica):
    body, headers, *_ = BODIES["a pickle in an npy"]
    replica.http.post("/clients/steady/predict", content=body, headers=headers)
    assert not Bomb.trace.exists()


@pytest.mark.parametrize("name", ["%7B%7D", "a%7Bb", "-x", "a" * 129, "a" * 300, "a%20b", "a%00b", "%C3%A9", "a*"])
@pytest.mark.parametrize(("method", "suffix"), [("GET", ""), ("DELETE", ""), ("POST", "/reset"), ("POST", "/predict")])
def test_a_bad_client_id_is_refused_before_it_reaches_redis(replica, assert_problem, name, method, suffix):
    before = set(replica.redis.keys())
    assert_problem(replica.http.request(method, f"/clients/{name}{suffix}"), 422, "invalid_client_id")
    assert set(replica.redis.keys()) <= before


@pytest.mark.parametrize("path", ["/clients/a%2Fb", "/clients/a/b/predict", "/clients/", "/nope"])
def test_a_path_that_leads_nowhere_is_404(replica, assert_problem, path):
    assert_problem(replica.http.get(f"{path}"), 404, "not_found")


def test_a_slash_too_many_is_404_and_not_redirected(replica, assert_problem):
    assert_problem(replica.http.post("/clients/steady/predict/"), 404, "not_found")


def test_an_unknown_client_is_404(replica, assert_problem):
    assert_problem(replica.http.get("/clients/nobody"), 404, "client_unknown")
    assert_problem(replica.http.post("/clients/nobody/reset"), 404, "client_unknown")
    assert replica.keys("nobody") == {}


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("PATCH", "/clients/x", {"DELETE", "GET"}), ("GET", "/clients/x/predict", {"POST"}), ("POST", "/models", {"GET"})],
)
def test_a_wrong_method_is_405_and_names_all_right_ones(replica, assert_problem, method, path, allowed):
    reply = replica.http.request(method, f"{path}")
    assert_problem(reply, 405, "method_not_allowed")
    assert set(reply.headers["allow"].split(", ")) >= allowed


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_413(replica, assert_problem, declared):
    limit = replica.service.settings.max_body_bytes
    content = bytes(limit + 1) if declared else (bytes(1 << 20) for _ in range((limit >> 20) + 2))
    reply = replica.http.post("/clients/steady/predict", content=content, headers=RAW)
    assert_problem(reply, 413, "body_too_large")


def connect(replica):
    address = urlsplit(replica.url)
    return socket.create_connection((address.hostname, address.port))


def head(length, extra=""):
    return (
        f"POST /clients/steady/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{extra}\r\n".encode()
    )


@pytest.mark.usefixtures("unharmed")
def test_a_body_that_never_ends_is_given_up_at_the_deadline(replica):
    with connect(replica) as slow:
        slow.sendall(head(1000, "X-Request-Timeout-Ms: 100\r\n") + b"x")
        slow.settimeout(5)
        assert slow.recv(100).startswith(b"HTTP/1.1 504")


@pytest.mark.usefixtures("unharmed")
def test_a_caller_who_hangs_up_inside_the_body_is_no_failure_of_the_service(replica, caplog):
    with connect(replica) as caller:
        caller.sendall(head(1000) + b"x")
        replica.await_waiting(1)
    replica.await_waiting(0)
    assert (
        replica.metric(
            'acclimate_requests_total{method="POST",model="fashion-cnn",route="/clients/{client_id}/predict",status="500"}'
        )
        == 0
    )
    assert caplog.text == ""


def test_an_ambiguous_layout_is_refused_for_a_model_whose_sides_equal_its_channels():
    """No bundled model has such an input, so the decoder is asked."""
    from acclimate_service.http.payload import PayloadError, PayloadLimits, decode
    from acclimate_store import InputSpec

    spec = InputSpec(channels=3, height=3, width=3, mean=(0.0,) * 3, std=(1.0,) * 3)
    body = npy(np.zeros((2, 3, 3, 3), np.uint8))
    with pytest.raises(PayloadError, match="state the layout") as caught:
        decode(body, "application/x-npy", {}, spec, PayloadLimits())
    assert caught.value.code == "ambiguous_layout"


def test_request_ids_of_the_caller_come_back_beside_that_of_the_service_when_sound(replica):
    for sent, kept in (("trace-1.a_b", True), ("x" * 128, True), ("x" * 129, False), ("a b", False)):
        reply = replica.http.get("/nope", headers={"X-Request-Id": sent})
        assert reply.headers.get("x-caller-request-id") == (sent if kept else None)
        assert reply.json()["request_id"] == reply.headers["x-request-id"] != sent


def test_a_failing_adapter_is_500_changes_nothing_and_is_logged_with_the_request(
    make_replica, post, assert_problem, caplog, shade
):
    replica = make_replica(adapter="failing")
    white = shade(255)
    assert post(replica, "cam", GREY[None]).status_code == 200
    before = replica.keys("cam")
    reply = post(replica, "cam", white, X_Request_Id="trace-7", Idempotency_Key="k")
    problem = assert_problem(reply, 500, "step_failed")
    assert "a defect of this adapter" not in reply.text
    assert f"request {problem['request_id']} (of its caller trace-7) failed" in caplog.text
    assert "a defect of this adapter" in caplog.text
    assert replica.keys("cam") == before
    assert post(replica, "cam", GREY[None], Idempotency_Key="k").json()["state"]["version"] == 2


def test_a_defect_of_the_service_itself_is_500_with_request_id_and_state_unknown(make_replica, assert_problem, caplog):
    replica = make_replica()
    replica.service.clients = object()
    reply = replica.http.get("/clients/cam", headers={"X-Request-Id": "trace-8"})
    problem = assert_problem(reply, 500, "internal", "unknown")
    assert f"request {problem['request_id']} (of its caller trace-8) failed" in caplog.text
    assert (
        replica.metric(
            'acclimate_requests_total{method="GET",model="fashion-cnn",route="/clients/{client_id}",status="500"}'
        )
        == 1
    )


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ({"X-Tensor-Shape": "0"}, "invalid_request"),
        ({"X-Tensor-Layout": "CHWN"}, "invalid_request"),
        ({"X-Tensor-Dtype": "int4"}, "wrong_dtype"),
        ({"X-Labels": "0"}, "invalid_labels"),
        ({"X-Labels": "["}, "invalid_labels"),
    ],
    ids=str,
)
def test_a_header_that_describes_no_body_is_refused_beside_any(replica, assert_problem, header, code):
    reply = replica.http.post(
        "/clients/header/predict", content=numbers(GREY[None].tolist()), headers={**JSON, **header}
    )
    assert_problem(reply, 422, code)
    assert replica.http.get("/clients/header").status_code == 404
