"""Random heads, offers to upgrade and imported states against a running service: no 5xx, and it never stands still."""

import asyncio
import contextlib
import json
import random
import re
import time
from urllib.parse import urlsplit

import numpy as np
import pytest

IMAGES = np.full((1, 28, 28), 100, np.uint8)
LONGEST_S = 0.5
METHODS = [b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH", b"CONNECT", b"PRI", b"get", b"", b"\xff"]
TARGETS = [
    *(
        b"/clients/fuzz" + end
        for end in (b"", b"/predict", b"/state", b"/feedback", b"/enroll", b"/reset", b"//", b"/%00")
    ),
    *(
        b"/models",
        b"/metrics",
        b"/docs",
        b"*",
        b"",
        b"/clients/%ff/predict",
        b"http://localhost/models",
        b"localhost:80",
    ),
    *(b"/" + b"a" * 70_000, b"/?" + b"a=b&" * 5000, b"/clients/fuzz/predict?adapt=1&adapt=0", b"/\xc3\xa9"),
]
VERSIONS = [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.1 ", b""]
NAMES = [
    *(b"Host", b"Content-Length", b"Transfer-Encoding", b"Connection", b"Upgrade", b"Expect", b"Content-Type", b"TE"),
    *(b"Content-Encoding", b"X-Tensor-Shape", b"X-Tensor-Dtype", b"X-Labels", b"Idempotency-Key", b"X-Request-Id"),
    *(
        b"X-Request-Timeout-Ms",
        b"X-Batch-Number",
        b"Origin",
        b"Sec-Fetch-Site",
        b"If-Match",
        b"Range",
        b"",
        b"\0",
        b"a b",
    ),
]
VALUES = [
    *(b"localhost", b"evil.example", b"0", b"5", b"-1", b"784", b"99999999999999999999", b"chunked", b"chunked, gzip"),
    *(b"close", b"keep-alive", b"upgrade", b"Upgrade, HTTP2-Settings", b"h2c", b"websocket", b"100-continue", b"gzip"),
    *(b"application/json", b"application/octet-stream", b"multipart/form-data; boundary=x", b"image/png", b"1,28,28"),
    *(
        b"4294967296,4294967296,3",
        b"[0]",
        b"[" * 3000,
        b"null",
        b"cross-site",
        b'"v1"',
        b"*",
        b"\xff",
        b"",
        b" " * 3000,
    ),
    *(b"a" * 9000, b"a" * 66_000, b"1\r\nX-More: 2", b"\t1"),
]
BODIES = [
    *(b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"0\r\nX: y\r\n\r\n", b'{"images": [[[0]]]}', bytes(784)),
    *(b"[" * 5000, b"--x\r\n\r\n\r\n--x--\r\n", b"\x1f\x8b" + bytes(30), b"ffffffffffffffff\r\n", b"\x89PNG\r\n\x1a\n"),
]
OFFERS = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAA\r\n",
    b"Upgrade: anything\r\nConnection: keep-alive, Upgrade\r\n",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\nExpect: 100-continue\r\n",
]
HIDDEN = b"DELETE /clients/victim HTTP/1.1\r\nHost: localhost\r\n\r\n"


def head(rng):
    """A request of likely and unlikely parts, perhaps damaged."""
    lines = [
        b" ".join(
            (rng.choice(METHODS[:6] if rng.random() < 0.8 else METHODS), rng.choice(TARGETS), rng.choice(VERSIONS))
        )
    ]
    lines[0] = lines[0] if rng.random() < 0.5 else b"POST /clients/fuzz/predict HTTP/1.1"
    lines += [b"Host: localhost"] * (rng.random() < 0.8)
    lines += [rng.choice(NAMES) + b": " + rng.choice(VALUES) for _ in range(rng.choice([0, 1, 2, 5, 5, 10, 150]))]
    sent = bytearray(b"\r\n".join(lines) + b"\r\n\r\n" + rng.choice(BODIES))
    for _ in range(rng.choice([0, 0, 0, 1, 5])):
        sent[rng.randrange(len(sent))] = rng.randrange(256)
    return bytes(sent)


def upgrade(rng):
    """An offer with a body that looks like a request."""
    body = HIDDEN * rng.choice([1, 2])
    framed = [
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body),
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
        b"transfer-encoding: Chunked\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n",
    ]
    method = rng.choice([b"POST", b"PUT", b"GET", b"PATCH"])
    target = rng.choice([b"/clients/fuzz/predict", b"/models", b"/clients/fuzz/state"])
    start = b"%b %b HTTP/1.1\r\nHost: localhost\r\n" % (method, target)
    return start + rng.choice(OFFERS) + rng.choice(framed)


def pieces(rng, sent):
    """The bytes, cut where chance wants it."""
    cuts = sorted(rng.randrange(len(sent) + 1) for _ in range(rng.choice([0, 1, 3])))
    return [sent[start:end] for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]


async def statuses(address, parts):
    """Send the parts, send no more, and read all that comes back."""
    reader, writer = await asyncio.open_connection(*address)
    with contextlib.suppress(OSError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write_eof()
    got = b""
    with contextlib.suppress(OSError):
        async with asyncio.timeout(20):
            while piece := await reader.read(65_536):
                got += piece
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return [int(status) for status in re.findall(rb"(?:^|\n|\})HTTP/1\.1 (\d{3}) ", got)]


@contextlib.contextmanager
def never_still(replica):
    """Check that the loop of the service had its turn all the time, so far as this process could run."""
    worst, stop = [0.0], []

    async def tick():
        wall, work = time.monotonic(), time.process_time()
        while not stop:
            await asyncio.sleep(0.01)
            now, worked = time.monotonic(), time.process_time()
            worst[0] = max(worst[0], min(now - wall, worked - work))
            wall, work = now, worked

    watch = asyncio.run_coroutine_threadsafe(tick(), replica.loop)
    yield
    stop.append(True)
    watch.result()
    assert worst[0] < LONGEST_S


async def storm(replica, make, number, seed):
    """Send many cases, some at a time; what came back that should not."""
    address, bad, cases = (urlsplit(replica.url).hostname, urlsplit(replica.url).port), [], iter(range(number))

    async def worker():
        for case in cases:
            rng = random.Random(f"{seed} {case}")
            sent = make(rng)
            found = await statuses(address, pieces(rng, sent))
            if any(status >= 500 for status in found):
                bad.append((case, found, sent[:200]))

    await asyncio.gather(*(worker() for _ in range(12)))
    return bad


NUMBERS = [pytest.param(200), pytest.param(5000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("number", NUMBERS)
def test_random_heads_are_answered_without_a_failure_or_a_standstill(replica, number, caplog):
    with never_still(replica):
        assert asyncio.run(storm(replica, head, number, "heads")) == []
    assert "Exception" not in caplog.text
    assert replica.http.get("/v2/health/live").status_code == 200


@pytest.mark.parametrize("number", NUMBERS)
def test_no_bytes_of_a_body_are_a_request_whatever_is_offered(replica, post, number):
    assert post(replica, "victim", IMAGES).status_code == 200
    version = replica.http.get("/clients/victim").json()["state"]["version"]
    with never_still(replica):
        assert asyncio.run(storm(replica, upgrade, number, "upgrades")) == []
    assert replica.http.get("/clients/victim").json()["state"]["version"] == version


def damaged(rng, state):
    """A state with another header, other tensors, or some bytes changed."""
    length = int.from_bytes(state[:8], "little")
    header, data = json.loads(state[8 : 8 + length]), state[8 + length :]
    kind = rng.randrange(6)
    if kind == 0:
        changed = bytearray(state)
        for _ in range(rng.randrange(1, 6)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if kind == 1:
        return state[: rng.randrange(len(state))]
    if kind == 2:
        return rng.choice([0, 1, 8, 2**20, 2**27, 2**63, 2**64 - 1]).to_bytes(8, "little") + state[8:]
    if kind == 3:
        return state[:8] + b"[" * length + data
    name = rng.choice([each for each in header if each != "__metadata__"] or ["x"])
    tensor = header.setdefault(name, {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    if kind == 4:
        tensor[rng.choice(list(tensor))] = rng.choice(
            [-1, 0, [], [2**63], [-1], "F8", "I64", None, {}, [[1]], "x" * 1000]
        )
    else:
        inner = json.loads(header["__metadata__"][next(iter(header["__metadata__"]))])
        inner[rng.choice(list(inner))] = rng.choice([-1, 2**63, 2**70, 1.5, "x", None, [], {"a": 1}, "none", "atp"])
        header["__metadata__"][next(iter(header["__metadata__"]))] = json.dumps(inner)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("number", [pytest.param(60), pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("adapter", ["atp", "em"])
def test_random_states_are_refused_or_served(replica, post, number, adapter):
    client, kind = f"imported-{adapter}", {"Content-Type": "application/json"}
    body = json.dumps({"adapter": adapter})
    assert replica.http.put(f"/clients/{client}", content=body, headers=kind).status_code == 200
    assert post(replica, client, IMAGES).status_code == 200
    state = replica.http.get(f"/clients/{client}/state").content
    taken = 0
    with never_still(replica):
        for case in range(number):
            data = damaged(random.Random(f"{adapter} {case}"), state)
            reply = replica.http.put(f"/clients/{client}/state", content=data)
            assert reply.status_code in (200, 409, 422), (case, reply.text)
            if reply.status_code == 200:
                taken += 1
                served = post(replica, client, IMAGES, "?adapt=false")
                assert served.status_code in (200, 422), (case, served.text)
    assert taken < number
