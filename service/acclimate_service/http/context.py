"""The context of one request to a client: what it says, read step by step, and the reply to it."""

import asyncio
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

import numpy as np
import orjson
from fastapi import Request
from numpy.typing import NDArray
from starlette.responses import Response

from acclimate_adapters.adapter import complete
from acclimate_service.clients.requests import Caller, ClientRequest, Reply, rfc3339
from acclimate_service.compute.process import slice_of
from acclimate_service.compute.shares import FLOW
from acclimate_service.errors import Problem
from acclimate_service.http.intake import LARGE, Intake
from acclimate_service.http.pacing import network_of
from acclimate_service.http.parameters import (
    check_once,
    check_query,
    client_scope,
    sound_key,
    sound_number,
    sound_timeout,
)
from acclimate_service.http.payload import (
    ARRAYS,
    BODY_HEADERS,
    RAW,
    check_headers,
    decoding,
    inflate,
    media_type,
    too_large,
    window_of,
)
from acclimate_service.http.replies import HeldReply
from acclimate_service.metrics import SPELLS
from acclimate_service.service import Service
from acclimate_service.state import fingerprint, random_rid

T = TypeVar("T")
_ON_LOOP: Final = 256 * 1024
"""Bytes of an array that are read in a fraction of a millisecond; another thread would take longer to begin."""
_PIECE: Final = 2**20
"""Bytes of a body that are admitted at a time."""
_SKIPPED: Final = re.compile(rb'"skipped":(?!0\.0[,}])')
"""The signal of that name in an answer, unless it is 0."""


class RequestContext:
    """One request to a client.

    Args:
        intake: what all requests share.
        http: what came.
        client_id: of its path; None where the body may name it: until `assign` is called, it is the caller's own.
        keyed: whether an idempotency key matters, as it does to requests that change the client.
        query: names of the parameters that it may have; None where others do no harm, since nothing is changed.
        version: what answers it; None for what answers its client.

    Attributes:
        service: what answers it.
        headers: by their names in lower case.
        client: whom it is for, once that is known.
        request_id: by which the log, and labels, know the request.

    Raises:
        Problem: the id, the key, the deadline, a header or a parameter is refused. The body is not read before.
    """

    def __init__(
        self,
        intake: Intake,
        http: Request,
        client_id: str | None,
        *,
        keyed: bool = True,
        query: tuple[str, ...] | None = (),
        version: Service | None = None,
    ) -> None:
        self._intake = intake
        self.service = intake.served.default if version is None else version
        self._pinned = version is not None
        self._http = http
        self.headers = dict(http.headers.items())
        if len(self.headers) < len(http.headers.raw):
            check_once(http)
        if query is not None and http.scope["query_string"]:
            check_query(http, query)
        self.content_type = self.headers.get("content-type", "")
        self._began = time.monotonic()
        self._spells = SPELLS.get()
        http.scope["state"]["model"] = intake.name
        asked, longest = self.headers.get("x-request-timeout-ms"), self.service.settings.request_timeout_ms
        self._deadline = self._began + (longest if asked is None else min(sound_timeout(asked), longest)) / 1000
        self._tenant: str = http.state.caller.tenant
        self._caller = self._tenant or network_of(http.client.host if http.client else "")
        payer = f"caller {self._caller}"  # no client can have this name
        kind = media_type(self.content_type)
        self._is_array = client_id is not None and kind in ARRAYS
        if BODY_HEADERS & self.headers.keys() and kind != RAW:  # with raw numbers they are read
            check_headers(self.headers, intake.limits)
        self._key: str | None = None
        self.request_id: str = http.state.request_id
        self._place, self._held, self._held_bytes = ExitStack(), ExitStack(), 0
        if client_id is not None:
            self.client = client_scope(client_id, self._tenant, self.service.settings.tenant)
            if intake.served.canary is not None and version is None:
                self.service = intake.served.of(self.client)
            payer = self.client.client
        self._flow = intake.name, self._caller, payer
        if keyed and "idempotency-key" in self.headers:
            self._key = sound_key(self.headers["idempotency-key"])

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count the request, and what it holds in memory, until the end of the block.

        Raises:
            Problem: `too_many_requests`.
        """
        self.service.under_way += 1
        try:
            with self._held, self._place:
                FLOW.set(self._flow)
                self._place.enter_context(self.service.admission.batches.hold(self._flow))
                yield
        finally:
            self.service.under_way -= 1
            if self.service.idle is not None:
                self.service.leave()
            if self._intake.memory.most > LARGE:
                self._intake.give_back()

    def assign(self, client_id: str, key: str | None) -> None:
        """Say whom an admitted request is for, and its key: both stood in its body, which is that client's from now on.

        Raises:
            Problem: the id or the key is refused; `too_many_requests`.
        """
        self.client = client_scope(client_id, self._tenant, self.service.settings.tenant)
        if not self._pinned:
            self.service.under_way -= 1
            self.service.leave()
            self.service = self._intake.served.of(self.client)
            self.service.under_way += 1
        self._key = None if key is None else sound_key(key)
        held, self._held_bytes = self._held_bytes, 0
        self._flow = self._intake.name, self._caller, self.client.client
        self._place.close()
        self._held.close()
        FLOW.set(self._flow)
        self._place.enter_context(self.service.admission.batches.hold(self._flow))
        self.hold(held)

    def batch_number(self, adapt: bool) -> int:
        """Place of a batch in the client's stream; 0 if the caller does not say. Raises Problem (`invalid_request`)."""
        text = self.headers.get("x-batch-number")
        return 0 if text is None else sound_number(text, adapt)

    def wait_at_most(self, seconds: float) -> None:
        """Bring the deadline forward to so many seconds after the request began, if it is later."""
        self._deadline = min(self._deadline, self._began + seconds)

    def hold(self, nbytes: int) -> None:
        """Count so many bytes more; raises as `admitted`."""
        self._held.enter_context(self._intake.memory.hold(self._flow, nbytes))
        self._held_bytes += nbytes

    def hold_images(self, images: NDArray[Any]) -> None:
        """Count images, unless they are a view of a body, which is counted; raises as `admitted`."""
        if images.flags.owndata:
            self.hold(images.nbytes)

    async def body(self, limit: int) -> bytes:
        """The body, refused as soon as it is known to be too large, too slow, or more than there is room for.

        Args:
            limit: bytes that it may have, before and after its Content-Encoding is undone.

        Raises:
            Problem: `deadline_exceeded`, `too_many_requests`.
            PayloadError: `body_too_large`, `unsupported_media_type`, or `malformed_body` where it is not as it says it
                is encoded.
        """
        named = self.headers.get("content-encoding")
        window = None if named is None else window_of(named)
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise too_large(limit)
        pieces, size, held = list[bytes](), 0, 0
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                async for piece in self._http.stream():
                    size += len(piece)
                    if size > limit:
                        raise too_large(limit)
                    if size > held:  # the first piece as it is, further ones with what may follow
                        more = max(size - held, _PIECE if held else 0)
                        self.hold(more)
                        held += more
                    pieces.append(piece)
        except TimeoutError:
            raise Problem("deadline_exceeded", "the deadline passed before the body was here") from None
        received = b"".join(pieces) if size <= _PIECE else await asyncio.to_thread(_joined, pieces)
        if window is None:
            return received
        inflated = await self.computed(partial(inflate, received, window, limit))
        self.hold(len(inflated))
        return inflated

    async def images(self, limit: int) -> NDArray[Any]:
        """The images of the body, which are counted too; `limit`, and what it raises, as of `body` and `decoded`."""
        body = await self.body(limit)
        spec, limits = self.service.bundle.manifest.input, self._intake.limits
        read = ARRAYS.get(media_type(self.content_type))
        if read is None:
            images = await self.decoded(decoding(body, self.content_type, self.headers, spec, limits), len(body))
        else:
            began = time.monotonic()
            images = await at_once(partial(read, body, self.headers, spec, limits), len(body))
            if self._spells is not None:
                self._spells.append(("decode", began, time.monotonic()))
        self.hold_images(images)
        return images

    async def computed(self, work: Callable[[], T]) -> T:
        """What blocking work gives that reads a body in one piece; raises what it raises, and `too_many_requests`."""

        def whole() -> Generator[None, None, T]:
            return work()
            yield

        return await self.decoded(whole())

    async def decoded(self, work: Generator[None, None, T], nbytes: int = _ON_LOOP + 1) -> T:
        """What is decoded from a body, a slice at a time, so that bodies of many pictures hold up nobody else's.

        Args:
            work: blocking from one of its steps to the next.
            nbytes: of the body. One that is an array is read at once.

        Raises:
            Problem: `too_many_requests`; `deadline_exceeded`, once the deadline has passed or the caller has left.
            PayloadError: what the work raises.
        """
        if self._is_array:
            return await at_once(partial(complete, work), nbytes)
        loop, began = asyncio.get_running_loop(), time.monotonic()
        with self._intake.decoding.hold(self._flow):
            while not (done := await loop.run_in_executor(self._intake.threads, slice_of, work)):
                if time.monotonic() >= self._deadline:
                    raise Problem("deadline_exceeded", "the deadline passed before the body was decoded")
                if await self._has_gone():
                    raise Problem("deadline_exceeded", "the caller hung up before the body was decoded")
        if self._spells is not None:
            self._spells.append(("decode", began, time.monotonic()))
        return done[0]

    async def request(self, *content: bytes | memoryview, number: int = 0) -> ClientRequest:
        """The request as the service knows it.

        Args:
            content: as bytes, all that decides the result; a repeated key with other content is refused.
            number: place of a batch in the client's stream, 0 for none.
        """
        if self._key is None:
            rid = mark = random_rid()  # there are no repeats to be told from others
        else:
            rid = self.client.rid(self._key)
            secret = self.service.settings.secret.encode()
            small = max(map(len, content), default=0) <= _ON_LOOP
            mark = fingerprint(secret, *content) if small else await asyncio.to_thread(fingerprint, secret, *content)
        if self._spells is not None:
            self._spells.append(("parse", self._began, time.monotonic()))
        return ClientRequest(
            client=self.client,
            rid=rid,
            fingerprint=mark,
            deadline=self._deadline,
            gone=self._has_gone,
            keyed=self._key is not None,
            name=self.request_id,
            number=number,
        )

    async def request_of(self, client_id: str, *content: bytes) -> ClientRequest:
        """As `request`, of one of several clients of the caller."""
        self.client = client_scope(client_id, self._tenant, self.service.settings.tenant)
        return await self.request(*content)

    def holding(self, nbytes: int) -> AbstractContextManager[None]:
        """Count so many bytes more until the end of a block; raises as `admitted`."""
        return self._intake.memory.hold(self._flow, nbytes)

    def caller(self) -> Caller:
        """Who waits for a request that is no client's, and is read by now."""
        if self._spells is not None:
            self._spells.append(("parse", self._began, time.monotonic()))
        return Caller(deadline=self._deadline, gone=self._has_gone, tenant=self._tenant)

    def model_of(self, done: Reply) -> Mapping[str, str]:
        """Name and version of the model that a request was applied to, as far as it is loaded; else of what answers."""
        if done.scope in ("", self.service.scope):
            return self.service.model
        return self.service.siblings.get(done.scope, self.service).model

    def state_of(self, done: Reply) -> dict[str, Any]:
        """What a reply says of the client's state."""
        return {
            "version": done.version,
            "status": done.status,
            "committed": done.committed,
            "replayed": done.replayed,
            "durability": self.service.probe.facts.durability,
            **({"lost": done.lost} if done.status == "rolled_back" else {}),
            **({"skipped": True} if _SKIPPED.search(done.answer) else {}),
            **({"adaptation": "paused"} if done.paused else {}),
        }

    def reply(self, done: Reply) -> Response:
        """The reply to a request that changed the client, or might have."""
        model = self.model_of(done) if done.scope else self.service.model
        head: dict[str, Any] = {"client_id": self.client.name, "model": model}
        if b',"request_id":' not in done.answer:  # the rows of a repeated batch are known by its first request id
            head["request_id"] = self.request_id
        tail: dict[str, Any] = {"state": self.state_of(done)}
        if self._key is not None and done.committed:
            tail["key_expires_at_earliest"] = _after(self.service.limits.key_min_ms)
        # the answer is JSON already, and may be large: its members are put between the others as they are
        members = (orjson.dumps(head)[1:-1], done.answer[1:-1], orjson.dumps(tail)[1:-1])
        body = b"{" + b",".join(filter(None, members)) + b"}"
        return Response(body, media_type="application/json")

    def reply_bytes(self, data: bytes, headers: Mapping[str, str]) -> Response:
        """A reply of bytes, which are counted until they were sent; raises as `admitted`."""
        self.hold(len(data))
        return HeldReply(data, headers, self._held.pop_all())

    async def _has_gone(self) -> bool:
        """Whether the caller has hung up since the body was read.

        One look at what has come since, without a wait: `Request.is_disconnected` cancels one, which takes the event
        loop two more rounds.
        """
        coming = self._http.receive().__await__()
        try:
            next(coming)
        except StopIteration as came:
            return bool(came.value["type"] == "http.disconnect")
        coming.close()
        return False


async def at_once(read: Callable[[], T], nbytes: int) -> T:
    """What is read from an array: on the event loop if it is small, else in a thread in which no pictures are decoded.

    For so few bytes no thread is faster.
    """
    return read() if nbytes <= _ON_LOOP else await asyncio.to_thread(read)


@lru_cache(maxsize=256)
def kind_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """What tells images from others of the same bytes."""
    return f"{shape} {dtype}".encode()


def _joined(pieces: list[bytes]) -> bytes:
    """A large body in one piece; Python copies it without holding others up, and gives the pieces back here."""
    whole = b"".join(pieces)
    pieces.clear()
    return whole


def _after(milliseconds: int) -> str:
    """The time so much later (RFC 3339)."""
    return rfc3339(time.time() + milliseconds / 1000)
