"""One guarded way to every JSON parser, media types, parameters and headers, memory and threads shared fairly."""

import asyncio
import gzip
import io
import json
import socket
import threading
import time
import zlib
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from acclimate_service.http import intake as intake_module
from acclimate_service.http.intake import Intake
from acclimate_service.http.payload.documents import MAX_JSON_TOKENS
from acclimate_service.http.replies import HeldReply

LISTS = b"[" + b"[]," * (MAX_JSON_TOKENS // 2) + b"[]]"
GREY = np.full((2, 28, 28), 9, np.uint8)
"""Flat: answered, but no step is taken."""
NOISE = np.random.default_rng(0).integers(0, 256, (2, 28, 28), np.uint8)
RAW = {"Content-Type": "application/octet-stream", "X-Tensor-Shape": "2,28,28"}
JSON = {"Content-Type": "application/json"}


def form(**fields):
    parts = b"".join(
        b'--line\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value)
        for name, value in fields.items()
    )
    return parts + b"--line--\r\n", {"Content-Type": "multipart/form-data; boundary=line"}


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status", "code"),
    [
        ("POST", "/feedback", LISTS, {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ("POST", "/feedback", LISTS, {"Content-Type": "\u00a0application/json"}, 415, "unsupported_media_type"),
        ("POST", "/feedback", LISTS, {"Content-Type": "application/json\u00a0"}, 415, "unsupported_media_type"),
        ("POST", "/feedback", LISTS, {}, 415, "unsupported_media_type"),
        ("POST", "/feedback", LISTS, {"Content-Type": "application/json  ; charset=utf-8"}, 413, "body_too_large"),
        ("POST", "/feedback", LISTS, {"Content-Type": "Application/JSON"}, 413, "body_too_large"),
        ("POST", "/predict", LISTS, {"Content-Type": "application/JSON;x"}, 413, "body_too_large"),
        ("POST", "/predict", b"\xef\xbb\xbf" + LISTS, JSON, 413, "body_too_large"),
        ("POST", "/predict", b'{"images":[' + b'{"":{}},' * 500_000 + b"0]}", JSON, 413, "body_too_large"),
        ("POST", "/enroll", LISTS, JSON, 413, "body_too_large"),
        ("POST", "/enroll", *form(labels=LISTS), 422, "invalid_labels"),
        ("POST", "/enroll", *form(labels=b"[" + b"1," * 40_000 + b"1]"), 422, "invalid_labels"),
        ("POST", "/feedback", *form(labels=LISTS), 422, "invalid_labels"),
        ("PUT", "", b'{"adapter": "none"}', {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ("PUT", "", b'{"adapter": "none"}', {}, 415, "unsupported_media_type"),
        ("PUT", "/state", b"x" * 9, {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ("PUT", "/state", b"x" * 9, {"Content-Type": "application/octet-stream\u00a0"}, 415, "unsupported_media_type"),
    ],
)
def test_no_way_leads_around_the_bounds_of_json_and_of_media_types(
    replica, assert_problem, method, path, content, headers, status, code
):
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    reply = replica.http.request(method, f"/clients/nobody{path}", content=content, headers=encoded)
    assert_problem(reply, status, code)


def test_json_of_the_most_values_is_parsed_and_one_more_is_refused():
    from acclimate_service.http.payload import PayloadError, load_json

    most = b"[" + b"0," * (MAX_JSON_TOKENS - 1) + b"0]"
    assert len(load_json(most)) == MAX_JSON_TOKENS
    with pytest.raises(PayloadError, match="body_too_large"):
        load_json(most[:-1] + b",0]")


def test_json_may_begin_with_a_byte_order_mark(replica, assert_problem):
    body = b"\xef\xbb\xbf" + json.dumps({"images": GREY.tolist()}).encode()
    assert replica.http.post("/clients/bom/predict?adapt=false", content=body, headers=JSON).status_code == 200
    body = b"\xef\xbb\xbf" + b'{"adapter": "none"}'
    assert replica.http.put("/clients/bom", content=body, headers=JSON).status_code == 200


@pytest.mark.parametrize("nbytes", [100_001, 2**27, 2**63])
def test_the_header_of_a_state_is_not_read_when_it_is_large(replica, assert_problem, nbytes):
    data = nbytes.to_bytes(8, "little") + b'{"a":' * 50_000
    reply = replica.http.put("/clients/imported/state", content=data)
    assert "100000" in assert_problem(reply, 422, "invalid_state")["detail"]


@pytest.mark.parametrize(
    ("method", "path", "query"),
    [
        ("POST", "/predict", "adapt=false&adapt=true"),
        ("POST", "/predict", "adapt=false&%61dapt=false"),
        ("POST", "/predict", "adpat=false"),
        ("POST", "/reset", "dry_run=true"),
        ("DELETE", "", "dry_run=true"),
        ("PUT", "", "adapter=none"),
        ("PUT", "/state", "replaces=3"),
        ("POST", "/feedback", "adapt=false"),
        ("POST", "/enroll", "adapt=false"),
    ],
)
def test_a_parameter_that_is_unknown_or_there_twice_is_refused_where_something_changes(
    replica, post, assert_problem, method, path, query
):
    content = GREY.tobytes()
    reply = replica.http.request(method, f"/clients/queried{path}?{query}", content=content, headers=RAW)
    assert query.partition("=")[0][:1] in assert_problem(reply, 422, "invalid_request")["detail"]
    assert replica.keys("queried") == {}


@pytest.mark.parametrize("name", ["Idempotency-Key", "X-Batch-Number", "Content-Type", "X-Tensor-Shape", "If-Match"])
def test_a_header_that_means_two_things_is_refused(replica, assert_problem, name):
    headers = [*RAW.items(), (name, RAW.get(name, "1")), (name, "2")]
    reply = replica.http.post("/clients/doubled/predict", content=GREY.tobytes(), headers=headers)
    assert name in assert_problem(reply, 422, "invalid_request")["detail"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "", b'{"adapter": "none", "adapter": "atp"}'),
        ("PUT", "", b'{"adapter": "atp", "hyperparameters": {"mode": "batch", "mo\\u0064e": "batch"}}'),
        ("POST", "/predict", b'{"images": [], "images": [[[0]]]}'),
        ("POST", "/feedback", b'{"rows": [{"request_id": "a:b", "row": 1, "row": 2, "label": 0}]}'),
    ],
)
def test_a_member_that_is_there_twice_is_refused(replica, assert_problem, method, path, body):
    reply = replica.http.request(method, f"/clients/doubled{path}", content=body, headers=JSON)
    assert "more than once" in assert_problem(reply, 422, "invalid_request")["detail"]


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [("gzip", gzip.compress), ("x-gzip", gzip.compress), ("deflate", zlib.compress), ("Identity", bytes)],
)
def test_a_compressed_body_is_read(replica, encoding, encode):
    url, plain = "/clients/packed/predict?adapt=false", replica.http.post
    expected = plain(url, content=GREY.tobytes(), headers=RAW).json()["predictions"]
    reply = plain(url, content=encode(GREY.tobytes()), headers={**RAW, "Content-Encoding": encoding})
    assert reply.json()["predictions"] == expected


@pytest.mark.parametrize(
    ("encoding", "content", "status", "code"),
    [
        ("br", b"x", 415, "unsupported_media_type"),
        ("gzip, gzip", b"x", 415, "unsupported_media_type"),
        ("gzip", b"no gzip", 400, "malformed_body"),
        ("gzip", gzip.compress(GREY.tobytes(), mtime=0)[:-4], 400, "malformed_body"),
        ("gzip", gzip.compress(GREY.tobytes(), mtime=0) + b"more", 400, "malformed_body"),
        ("gzip", gzip.compress(bytes(32 * 2**20 + 1), mtime=0), 413, "body_too_large"),
    ],
    ids=["brotli", "twice", "none", "cut", "followed", "bomb"],
)
def test_a_body_that_is_not_as_it_says_it_is_packed_or_is_a_bomb_is_refused(
    replica, assert_problem, encoding, content, status, code
):
    headers = {**RAW, "Content-Encoding": encoding}
    reply = replica.http.post("/clients/packed/predict", content=content, headers=headers)
    assert_problem(reply, status, code)


@pytest.mark.parametrize("path", ["/models", "/adapters", "/v2/health/live", "/v2/health/ready", "/metrics", "/docs"])
def test_head_is_answered_as_get_without_a_body(replica, path):
    reply = replica.http.head(path)
    assert (reply.status_code, reply.content) == (200, b"")
    assert reply.headers["content-type"] == replica.http.get(path).headers["content-type"]


def test_head_of_a_client_and_its_state(replica, post):
    assert post(replica, "headed", GREY).status_code == 200
    for path in ("/clients/headed", "/clients/headed/state"):
        head, get = replica.http.head(path), replica.http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers.get("etag") == get.headers.get("etag")
    assert replica.http.head("/clients/nobody").status_code == 404


@pytest.fixture
def narrow(make_replica):
    """A service that holds no more than 8 MiB for all requests."""
    return make_replica(max_held_bytes=8 * 2**20)


def upload(replica, client, sent, path="state", method="PUT"):
    """A connection on which so many bytes of a larger body were sent."""
    address = urlsplit(replica.url)
    caller = socket.create_connection((address.hostname, address.port))
    head = f"{method} /clients/{client}/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {sent + 1000}\r\n"
    caller.sendall(f"{head}Content-Type: application/octet-stream\r\n\r\n".encode() + bytes(sent))
    caller.settimeout(10)
    return caller


def test_unfinished_uploads_count_and_those_that_find_no_room_are_told_so(narrow, post, assert_problem):
    first = upload(narrow, "a", 3_000_000)
    narrow.await_waiting(1)
    time.sleep(0.2)  # until all of it has been read
    second = upload(narrow, "b", 4_000_000)
    reply = second.recv(10_000)
    assert reply.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1" in reply
    assert b"bytes" in reply
    second.close()
    assert post(narrow, "c", GREY).status_code == 200
    first.close()
    narrow.await_waiting(0)
    assert narrow.http.put("/clients/a/state", content=bytes(2**20)).json()["code"] == "invalid_state"


def test_one_client_takes_no_more_memory_than_it_leaves_free(narrow):
    kept = upload(narrow, "a", 3_000_000)
    narrow.await_waiting(1)
    time.sleep(0.3)  # until all of it has been read
    again = upload(narrow, "a", 3_000_000)
    assert b"of this client are waiting already" in again.recv(10_000)
    kept.close()
    again.close()


def test_a_state_that_nobody_reads_counts_until_it_is_given_up(make_replica, monkeypatch, post):
    sent, gate, intakes, begin = [], asyncio.Event(), [], Intake.__init__

    def note(self, *given):
        begin(self, *given)
        intakes.append(self)

    monkeypatch.setattr(Intake, "__init__", note)
    replica = make_replica()
    (intake,) = intakes
    assert post(replica, "big", GREY).status_code == 200
    size = len(replica.http.get("/clients/big/state").content)

    async def hang(self, scope, receive, send):
        with self._held:
            sent.append(intake.memory.taken)
            await gate.wait()

    monkeypatch.setattr(HeldReply, "__call__", hang)
    caller = upload(replica, "big", 0, "state", "GET")
    for _ in range(100):
        if sent:
            break
        time.sleep(0.02)
    assert sent == [size]
    caller.close()
    replica.loop.call_soon_threadsafe(gate.set)
    for _ in range(100):
        if not intake.memory.taken:
            break
        time.sleep(0.02)
    assert not intake.memory.taken


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [("POST", "/reset", None), ("DELETE", "", None), ("GET", "/state", None), ("PUT", "", "application/json")],
)
def test_changes_and_exports_wait_for_admission_as_batches_do(
    make_replica, post, gate, pool, assert_problem, method, path, kind
):
    gate.shut = False
    replica = make_replica(adapter="gated", max_waiting=2)
    gate.shut = True
    waiting = [pool.submit(post, replica, f"cam-{number}", NOISE) for number in range(2)]
    replica.await_waiting(2)
    headers = {"Content-Type": kind} if kind else {}
    reply = replica.http.request(method, f"/clients/other{path}", content=b'{"adapter": "none"}', headers=headers)
    assert_problem(reply, 429, "too_many_requests")
    assert reply.headers["retry-after"] == "1"
    gate.open()
    assert [reply.result().status_code for reply in waiting] == [200, 200]


def png(pixels, **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", **options)
    return buffer.getvalue()


@pytest.fixture
def slow_pictures(monkeypatch):
    """Pictures take 50 ms each; how many were decoded is told."""
    from acclimate_service.http.payload import images

    decoded, real = [], images._decoded

    def slow(*arguments):
        time.sleep(0.05)
        decoded.append(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(images, "_decoded", slow)
    return decoded


def many(number):
    return {"files": [("images", (f"{at}.png", png(GREY[0]), "image/png")) for at in range(number)]}


def test_the_deadline_is_looked_at_between_pictures(replica, assert_problem, slow_pictures):
    headers = {"X-Request-Timeout-Ms": "300"}
    began = time.monotonic()
    reply = replica.http.post("/clients/pictures/predict", **many(100), headers=headers)
    assert_problem(reply, 504, "deadline_exceeded")
    assert time.monotonic() - began < 3
    assert len(slow_pictures) < 20


def test_a_caller_who_leaves_is_noticed_between_pictures(replica, slow_pictures):
    request = replica.http.build_request("POST", "/clients/pictures/predict", **many(100))
    body = request.read()
    address = urlsplit(replica.url)
    with socket.create_connection((address.hostname, address.port)) as caller:
        head = f"Host: localhost\r\nContent-Type: {request.headers['content-type']}\r\nContent-Length: {len(body)}\r\n"
        caller.sendall(f"POST /clients/pictures/predict HTTP/1.1\r\n{head}\r\n".encode() + body)
        replica.await_waiting(1)
    replica.await_waiting(0)
    assert len(slow_pictures) < 50


def test_one_picture_does_not_wait_for_forms_of_many(replica, pool, slow_pictures):
    forms = [pool.submit(replica.http.post, f"/clients/form-{at}/predict", **many(60)) for at in range(4)]
    replica.await_waiting(4)
    began = time.monotonic()
    image = {"content": png(GREY[0]), "headers": {"Content-Type": "image/png"}}
    assert replica.http.post("/clients/one/predict", **image).status_code == 200
    assert time.monotonic() - began < 60 * 0.05
    assert {name.rpartition("_")[0] for name in slow_pictures} == {"acclimate-decode"}
    for each in forms:
        assert each.result().status_code == 200


def test_more_bodies_than_may_be_decoded_at_once_are_refused(make_replica, pool, monkeypatch, slow_pictures):
    monkeypatch.setattr(intake_module, "MAX_DECODING", 2)
    replica = make_replica()
    forms = [pool.submit(replica.http.post, f"/clients/form-{at}/predict", **many(20)) for at in range(6)]
    replies = [each.result() for each in forms]
    refused = [reply for reply in replies if reply.status_code == 429]
    assert refused
    assert "bodies to be decoded" in refused[0].json()["detail"]
    assert refused[0].headers["retry-after"] == "1"
    assert sum(reply.status_code == 200 for reply in replies) == 6 - len(refused) >= 2


def test_rows_of_two_requests_of_one_callers_id_are_told_apart(replica, post, stream):
    first, second = stream(0, 2, 3)
    answers = [post(replica, "twins", images[:, 0], X_Request_Id="same").json() for images in (first, second)]
    ids = [answer["request_id"] for answer in answers]
    assert len({*ids, "same"}) == 3
    rows = [{"request_id": name, "row": 0, "label": 1} for name in (*ids, "same")]
    told = replica.http.post("/clients/twins/feedback", json={"rows": rows}).json()["feedback"]
    assert told == {"counted": 2, "duplicate": 0, "contradicting": 0, "unknown": 1}


async def ask(address, request):
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    reply = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(reply[9:12])


@pytest.mark.parametrize(
    "line", ["POST /clients/{}/reset", "GET /clients/{}/state", "GET /clients/{}", "DELETE /clients/{}"]
)
def test_a_flood_finds_no_room_but_never_a_store_that_is_said_to_be_away(make_replica, post, line):
    replica = make_replica(max_waiting=32)
    for number in range(8):
        assert post(replica, f"cam-{number}", GREY).status_code == 200
    address = urlsplit(replica.url)

    async def flood():
        head = " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        requests = [(line.format(f"cam-{number % 8}") + head).encode() for number in range(300)]
        return await asyncio.gather(*(ask((address.hostname, address.port), request) for request in requests))

    found = set(asyncio.run(flood()))
    assert found & {200, 204}
    assert found <= {200, 204, 404, 409, 429}


def test_a_batch_is_answered_though_its_caller_sends_no_more(replica):
    address = urlsplit(replica.url)
    head = "POST /clients/half/predict HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Tensor-Shape: 2,28,28\r\n"
    kind = f"Content-Type: application/octet-stream\r\nContent-Length: {GREY.size}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port)) as caller:
        caller.sendall((head + kind).encode() + GREY.tobytes())
        caller.shutdown(socket.SHUT_WR)
        caller.settimeout(20)
        reply = b""
        while piece := caller.recv(10_000):
            reply += piece
    assert b"HTTP/1.1 200 OK" in reply
    assert b'"committed":true' in reply
