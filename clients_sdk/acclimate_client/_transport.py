"""Sends calls, again where that may help: the part of both clients that waits."""

import asyncio
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from acclimate_client._calls import Call, Settings
from acclimate_client._problems import from_httpx
from acclimate_client._replies import Events
from acclimate_client.errors import AcclimateClientError, ConnectionFailed, ProblemError, Timeout
from acclimate_client.results import Prediction, TimelinePoint

T = TypeVar("T")

BASE_SECONDS = 0.25
DOUBLINGS = 5  # the range of the back-off ends at 8 s
LONGEST_RETRY_AFTER = 60.0  # seconds; a caller told to wait longer is better asked than blocked


def backoff(failures: int, draw: float) -> float:
    """Returns the seconds to wait: exponential back-off with full jitter.

    Args:
        failures: Failed attempts before this one, 0 or more.
        draw: Uniform random number in 0..1.

    Reference:
        M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    return draw * BASE_SECONDS * 2.0 ** min(failures, DOUBLINGS)


@cache
def certificates() -> ssl.SSLContext:
    """Returns what all clients of the process trust; reading it takes longer than a request, so it is read once."""
    return httpx.create_ssl_context()


class Retries:
    """The attempts of one logical call.

    Args:
        call: What is being attempted.
        max_retries: Attempts after the first one.
        random: Draws from 0..1 for the jitter.
    """

    def __init__(self, call: Call[Any], max_retries: int, random: Callable[[], float]) -> None:
        self._call = call
        self._allowed = max_retries if call.repeats else 0
        self._random = random
        self._failures = 0
        self._maybe_committed = False

    def after(self, cause: httpx.RequestError | AcclimateClientError) -> float:
        """Returns the seconds to wait before the next attempt.

        Raises:
            AcclimateClientError: There is no next attempt; this is what became of the call.
        """
        error = cause if isinstance(cause, AcclimateClientError) else from_httpx(cause)
        asked = (error.retry_after if isinstance(error, ProblemError) else None) or 0.0
        self._record(error)
        if not error.retryable or self._failures > self._allowed or asked > LONGEST_RETRY_AFTER:
            raise error
        return asked + backoff(self._failures - 1, self._random())

    def settled(self, result: T) -> T:
        """Returns the result of the last attempt, with what the earlier ones may have done to the state."""
        # An unadapted answer speaks of its own attempt: without Redis nobody knows what became of the others.
        in_doubt = self._call.writes and self._maybe_committed
        if in_doubt and isinstance(result, Prediction) and result.state.committed is False:
            return replace(result, state=replace(result.state, committed="unknown"))
        return result

    def _record(self, error: AcclimateClientError) -> None:
        self._failures += 1
        # The last reply speaks of its own attempt; an earlier one without a clear reply may have changed the state.
        self._maybe_committed |= error.state_committed is not False
        if not self._call.writes:
            error.state_committed = False
        elif self._maybe_committed and error.state_committed is False:
            error.state_committed = "unknown"
        error.attempts = self._failures
        error.idempotency_key = self._call.idempotency_key


class Transport:
    """Connections that block the caller. Arguments are those of `acclimate_client.Client`."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout: float = 30.0,
        max_retries: int = 4,
        headers: Mapping[str, str] | None = None,
        model: str | None = None,
        api_key: str | None = None,
        _sleep: Callable[[float], None] = time.sleep,
        _random: Callable[[], float] = random.random,
    ) -> None:
        self._settings = Settings(base_url, timeout, max_retries, headers, model, api_key)
        self._http = httpx.Client(
            base_url=base_url, timeout=timeout, headers=self._settings.all_headers(), verify=certificates()
        )
        self._sleep = _sleep
        self._random = _random

    def close(self) -> None:
        """Closes the connections; the client cannot be used afterwards."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, call: Call[T]) -> T:
        call = self._settings.of_model(call)
        retries = Retries(call, self._settings.max_retries, self._random)
        while True:
            try:
                return retries.settled(call.read(self._http.send(call.request(self._http))))
            except (httpx.RequestError, AcclimateClientError) as error:
                delay = retries.after(error)
            self._sleep(delay)

    def _watch(self, call: Call[None], after: int | None) -> Iterator[TimelinePoint]:
        call, retries = self._settings.of_model(call), None
        while True:
            retries = retries or Retries(call, self._settings.max_retries, self._random)
            reply = None
            try:
                reply = self._http.send(call.since(after).request(self._http), stream=True)
                if not reply.is_success:
                    reply.read()
                    call.read(reply)
                events = Events(reply)
                for line in reply.iter_lines():
                    point, after = events.point(line), after if events.last is None else events.last
                    if point is not None:
                        retries = None
                        yield point
                delay = BASE_SECONDS  # the server ended it, as when it is about to end itself
            except (httpx.RequestError, AcclimateClientError) as error:
                delay = (retries or Retries(call, self._settings.max_retries, self._random)).after(error)
            finally:
                if reply is not None:
                    reply.close()
            self._sleep(delay)

    def _probe(self, call: Call[bool]) -> bool:
        try:
            return self._run(call)
        except (ConnectionFailed, Timeout):
            return False


class AsyncTransport:
    """Connections of one event loop. Arguments are those of `acclimate_client.Client`."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout: float = 30.0,
        max_retries: int = 4,
        headers: Mapping[str, str] | None = None,
        model: str | None = None,
        api_key: str | None = None,
        _sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        _random: Callable[[], float] = random.random,
    ) -> None:
        self._settings = Settings(base_url, timeout, max_retries, headers, model, api_key)
        self._http = httpx.AsyncClient(
            base_url=base_url, timeout=timeout, headers=self._settings.all_headers(), verify=certificates()
        )
        self._sleep = _sleep
        self._random = _random

    async def close(self) -> None:
        """Closes the connections; the client cannot be used afterwards."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, call: Call[T]) -> T:
        call = self._settings.of_model(call)
        retries = Retries(call, self._settings.max_retries, self._random)
        while True:
            try:
                return retries.settled(call.read(await self._http.send(call.request(self._http))))
            except (httpx.RequestError, AcclimateClientError) as error:
                delay = retries.after(error)
            await self._sleep(delay)

    async def _watch(self, call: Call[None], after: int | None) -> AsyncIterator[TimelinePoint]:
        call, retries = self._settings.of_model(call), None
        while True:
            retries = retries or Retries(call, self._settings.max_retries, self._random)
            reply = None
            try:
                reply = await self._http.send(call.since(after).request(self._http), stream=True)
                if not reply.is_success:
                    await reply.aread()
                    call.read(reply)
                events = Events(reply)
                async for line in reply.aiter_lines():
                    point, after = events.point(line), after if events.last is None else events.last
                    if point is not None:
                        retries = None
                        yield point
                delay = BASE_SECONDS
            except (httpx.RequestError, AcclimateClientError) as error:
                delay = (retries or Retries(call, self._settings.max_retries, self._random)).after(error)
            finally:
                if reply is not None:
                    await reply.aclose()
            await self._sleep(delay)

    async def _probe(self, call: Call[bool]) -> bool:
        try:
            return await self._run(call)
        except (ConnectionFailed, Timeout):
            return False
