"""Random heads, bodies, offers to upgrade and imported states against a running service.

No 5xx, every connection comes to its end, and the event loop never stands still.
"""

import asyncio
import contextlib
import json
import random
import re
import time
from collections import Counter
from urllib.parse import urlsplit

import numpy as np
import pytest

IMAGES = np.full((1, 28, 28), 100, np.uint8)
LONGEST_S = 0.5
FEW = 200
MANY = {"heads": 4000, "bodies": 2500, "upgrades": 2500, "imports": 1500}
"""Cases of each kind: more than 10,000 together."""
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
ROUTES = [
    (b"POST", b"/predict"),
    (b"POST", b"/feedback"),
    (b"POST", b"/enroll"),
    (b"POST", b"/rollback"),
    (b"PUT", b""),
    (b"PUT", b"/state"),
]
CONTENTS = {
    b"application/json": b'{"images": [[[0, 1]]], "labels": [1], "adapter": "em", "rows": [{"request_id": "a"}]}',
    b"application/json; charset=utf-8": b'{"adapter": "atp", "hyperparameters": {"steps": 1}, "adaptation": "running"}',
    b"application/octet-stream": IMAGES.tobytes(),
    b"application/x-npy": b"\x93NUMPY\x01\0v\0{'descr': '|u1', 'fortran_order': False, 'shape': (1, 28, 28)}"
    + b" " * 58
    + IMAGES.tobytes(),
    b"multipart/form-data; boundary=x": b'--x\r\nContent-Disposition: form-data; name="a"; filename="a.png"\r\n\r\n'
    + b"\x89PNG\r\n\x1a\n\r\n--x--\r\n",
    b"image/png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x1c\0\0\0\x1c\x08\0\0\0\0",
    b"image/jpeg": b"\xff\xd8\xff\xe0\0\x10JFIF\0\x01\x01\0\0\x01\0\x01\0\0\xff\xc0\0\x0b\x08\0\x1c\0\x1c\x01",
    b"image/gif": b"GIF89a\x1c\0\x1c\0\x80\0\0",
    b"text/plain": b"[[], [], []]",
}
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


def body(rng):
    """A body of some kind on a route that reads one, perhaps of another kind than its head says, perhaps damaged."""
    route, query = rng.choice(ROUTES), rng.choice([b"", b"", b"?probabilities=true", b"?adapt=false"])
    kind, content = rng.choice(list(CONTENTS.items()))
    kind = rng.choice(list(CONTENTS)) if rng.random() < 0.2 else kind
    content = bytearray(content * rng.choice([1, 1, 1, 2, 300]))
    for _ in range(rng.choice([0, 0, 1, 3, 20])):
        if content:
            place = rng.randrange(len(content))
            content[place : place + rng.choice([0, 1, 1, 5])] = rng.randbytes(rng.choice([0, 1, 1, 5]))
    lines = [b"%b /clients/fuzz%b%b HTTP/1.1" % (*route, query), b"Host: localhost", b"Content-Type: " + kind]
    lines += [b"X-Tensor-Shape: " + rng.choice([b"1,28,28", b"2,28,28,1", b"0", b"-1,28,28", b"9" * 30])] * (
        rng.random() < 0.5
    )
    lines += [b"X-Labels: " + rng.choice([b"[1]", b'["Coat"]', b"[", b"[10]", b"[1.5]"])] * (rng.random() < 0.3)
    lines += [b"Content-Encoding: " + rng.choice([b"gzip", b"deflate", b"br"])] * (rng.random() < 0.1)
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(content), b"", b""]) + content


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
    """Send the parts, send no more, and read all that comes back; 0 stands for a connection that came to no end."""
    reader, writer = await asyncio.open_connection(*address)
    with contextlib.suppress(OSError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write_eof()
    got, silent = b"", []
    try:
        async with asyncio.timeout(60):
            while piece := await reader.read(65_536):
                got += piece
    except TimeoutError:
        silent = [0]
    except OSError:
        pass  # refused while it was still being sent
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return [int(status) for status in re.findall(rb"(?:^|\n|\})HTTP/1\.1 (\d{3}) ", got)] + silent


@contextlib.contextmanager
def never_still(replica):
    """Check that the loop of the service had its turn all the time, so far as this process could run.

    Gives a list of the longest standstill so far (s).
    """
    worst, stop = [0.0], []

    async def tick():
        wall, work = time.monotonic(), time.process_time()
        while not stop:
            await asyncio.sleep(0.01)
            now, worked = time.monotonic(), time.process_time()
            worst[0] = max(worst[0], min(now - wall, worked - work))
            wall, work = now, worked

    watch = asyncio.run_coroutine_threadsafe(tick(), replica.loop)
    yield worst
    stop.append(True)
    watch.result()
    assert worst[0] < LONGEST_S


async def storm(replica, make, number, seed):
    """Send many cases, some at a time; how many were, which is all of them unless one came to something bad."""
    address, bad, cases = (urlsplit(replica.url).hostname, urlsplit(replica.url).port), [], iter(range(number))
    done = 0

    async def worker():
        nonlocal done
        for case in cases:
            rng = random.Random(f"{seed} {case}")
            sent = make(rng)
            found = await statuses(address, pieces(rng, sent))
            done += 1
            honest = {504} if b"timeout-ms" in sent.lower() else set()  # the deadline that the request itself names
            if any(status == 0 or status >= 500 for status in set(found) - honest):
                bad.append((case, found, sent[:200]))

    await asyncio.gather(*(worker() for _ in range(12)))
    assert bad == []
    return done


STORMS = {"heads": head, "bodies": body, "upgrades": upgrade}


@pytest.mark.parametrize("kind", ["heads", "bodies"])
def test_random_requests_are_answered_without_a_failure_or_a_standstill(replica, kind, caplog):
    with never_still(replica):
        assert asyncio.run(storm(replica, STORMS[kind], FEW, kind)) == FEW
    assert "Exception" not in caplog.text
    assert replica.http.get("/v2/health/live").status_code == 200


def unharmed(replica, post, number):
    """Offer upgrades, and see that no request inside of a body was done; how many were offered."""
    assert post(replica, "victim", IMAGES).status_code == 200
    version = replica.http.get("/clients/victim").json()["state"]["version"]
    offered = asyncio.run(storm(replica, upgrade, number, "upgrades"))
    assert replica.http.get("/clients/victim").json()["state"]["version"] == version
    return offered


def test_no_bytes_of_a_body_are_a_request_whatever_is_offered(replica, post):
    with never_still(replica):
        assert unharmed(replica, post, FEW) == FEW


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


def import_damaged(replica, post, adapter, number):
    """Import damaged states: each is refused, or batches are answered from it. How many were sent."""
    client, kind = f"imported-{adapter}", {"Content-Type": "application/json"}
    body = json.dumps({"adapter": adapter})
    assert replica.http.put(f"/clients/{client}", content=body, headers=kind).status_code == 200
    assert post(replica, client, IMAGES).status_code == 200
    state = replica.http.get(f"/clients/{client}/state").content
    taken = 0
    for case in range(number):
        data = damaged(random.Random(f"{adapter} {case}"), state)
        reply = replica.http.put(f"/clients/{client}/state", content=data)
        assert reply.status_code in (200, 409, 422), (case, reply.text)
        if reply.status_code == 200:
            taken += 1
            served = post(replica, client, IMAGES, "?adapt=false")
            assert served.status_code in (200, 422), (case, served.text)
    assert taken < number
    return number


@pytest.mark.parametrize("adapter", ["atp", "em"])
def test_random_states_are_refused_or_served(replica, post, adapter):
    with never_still(replica):
        import_damaged(replica, post, adapter, 60)


@pytest.mark.slow
def test_ten_thousand_cases_of_all_kinds_bring_no_failure_and_no_standstill(replica, post, record_property, caplog):
    sent = Counter()
    with never_still(replica) as worst:
        for kind in ("heads", "bodies"):
            sent[kind] += asyncio.run(storm(replica, STORMS[kind], MANY[kind], f"many {kind}"))
        sent["upgrades"] += unharmed(replica, post, MANY["upgrades"])
        for adapter in ("atp", "em"):
            sent["imports"] += import_damaged(replica, post, adapter, MANY["imports"] // 2)
    record_property("cases", json.dumps(sent))
    record_property("longest standstill (s)", worst[0])
    print(json.dumps({**sent, "longest standstill (s)": worst[0]}))
    assert sent == MANY
    assert sent.total() >= 10_000
    assert "Exception" not in caplog.text
    assert replica.http.get("/v2/health/live").status_code == 200
