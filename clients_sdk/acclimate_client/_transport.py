"""Sends calls, again where that may help: the part of both clients that waits."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Self, TypeVar

import httpx

from acclimate_client._calls import Call, Settings
from acclimate_client._retry import Retries
from acclimate_client.errors import AcclimateClientError, ConnectionFailed, Timeout

T = TypeVar("T")


class Transport:
    """Connections that block the caller. Arguments are those of `acclimate_client.Client`."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout: float = 30.0,
        max_retries: int = 4,
        headers: Mapping[str, str] | None = None,
        _sleep: Callable[[float], None] = time.sleep,
        _random: Callable[[], float] = random.random,
    ) -> None:
        self._settings = Settings(base_url, timeout, max_retries, headers)
        self._http = httpx.Client(base_url=base_url, timeout=timeout, headers=self._settings.all_headers())
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
        retries = Retries(call, self._settings.max_retries, self._random)
        while True:
            try:
                return retries.settled(call.read(self._http.send(call.request(self._http))))
            except (httpx.RequestError, AcclimateClientError) as error:
                delay = retries.after(error)
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
        _sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        _random: Callable[[], float] = random.random,
    ) -> None:
        self._settings = Settings(base_url, timeout, max_retries, headers)
        self._http = httpx.AsyncClient(base_url=base_url, timeout=timeout, headers=self._settings.all_headers())
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
        retries = Retries(call, self._settings.max_retries, self._random)
        while True:
            try:
                return retries.settled(call.read(await self._http.send(call.request(self._http))))
            except (httpx.RequestError, AcclimateClientError) as error:
                delay = retries.after(error)
            await self._sleep(delay)

    async def _probe(self, call: Call[bool]) -> bool:
        try:
            return await self._run(call)
        except (ConnectionFailed, Timeout):
            return False
