"""The client for asyncio, method for method the blocking one."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from acclimate_client import _calls
from acclimate_client._calls import Call, Labels, Settings
from acclimate_client._images import Images, Layout
from acclimate_client._retry import Retries
from acclimate_client.errors import AcclimateClientError, ConnectionFailed, Timeout
from acclimate_client.results import (
    AdapterDescription,
    ClientInfo,
    ConfigureResult,
    EnrolResult,
    ImportResult,
    ModelInfo,
    Prediction,
    ResetResult,
)

T = TypeVar("T")


class AsyncClient:
    """Talks to an Acclimate service from one event loop. Close it, or use it as an async context manager.

    Arguments, retries and errors are those of `acclimate_client.Client`.
    """

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

    async def predict(
        self,
        client_id: str,
        images: Images,
        *,
        adapt: bool = True,
        probabilities: bool = False,
        batch_number: int | None = None,
        idempotency_key: str | None = None,
        layout: Layout | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the server's deadline too, and one signature for both clients
    ) -> Prediction:
        """Predicts one batch and, unless told otherwise, adapts the client's model to it; see `Client.predict`."""
        # Files are read and pictures encoded in a thread: the event loop has others to serve.
        call = await asyncio.to_thread(
            _calls.predict,
            client_id,
            images,
            adapt=adapt,
            probabilities=probabilities,
            batch_number=batch_number,
            idempotency_key=idempotency_key,
            layout=layout,
            timeout=self._settings.timeout if timeout is None else timeout,
        )
        return await self._run(call)

    async def get(self, client_id: str) -> ClientInfo:
        """Describes a client; see `Client.get`."""
        return await self._run(_calls.get(client_id))

    async def reset(self, client_id: str, *, idempotency_key: str | None = None) -> ResetResult:
        """Puts a client back to the global model; see `Client.reset`."""
        return await self._run(_calls.reset(client_id, idempotency_key=idempotency_key))

    async def configure(
        self, client_id: str, adapter: str, /, *, idempotency_key: str | None = None, **hyperparameters: Any
    ) -> ConfigureResult:
        """Chooses the adapter of a client; see `Client.configure`."""
        return await self._run(_calls.configure(client_id, adapter, hyperparameters, idempotency_key=idempotency_key))

    async def enroll(
        self,
        client_id: str,
        images: Images,
        labels: Labels,
        *,
        idempotency_key: str | None = None,
        layout: Layout | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as in predict
    ) -> EnrolResult:
        """Lets a client begin anew from labelled images of its own; see `Client.enroll`."""
        call = await asyncio.to_thread(
            _calls.enroll,
            client_id,
            images,
            labels,
            idempotency_key=idempotency_key,
            layout=layout,
            timeout=self._settings.timeout if timeout is None else timeout,
        )
        return await self._run(call)

    async def export_state(self, client_id: str) -> bytes:
        """Fetches the state of a client; see `Client.export_state`."""
        return await self._run(_calls.export_state(client_id))

    async def import_state(
        self, client_id: str, data: bytes, *, replaces: int | None = None, idempotency_key: str | None = None
    ) -> ImportResult:
        """Lets a client go on from an exported state; see `Client.import_state`."""
        return await self._run(_calls.import_state(client_id, data, replaces=replaces, idempotency_key=idempotency_key))

    async def delete(self, client_id: str) -> None:
        """Removes a client and all that was learned for it; see `Client.delete`."""
        await self._run(_calls.delete(client_id))

    async def models(self) -> tuple[ModelInfo, ...]:
        """Lists the models the server offers; see `Client.models`."""
        return await self._run(_calls.models())

    async def adapters(self) -> tuple[AdapterDescription, ...]:
        """Lists the adapters and chains; see `Client.adapters`."""
        return await self._run(_calls.adapters())

    async def live(self) -> bool:
        """Returns whether the server answers at all; see `Client.live`."""
        return await self._probe(_calls.live())

    async def ready(self) -> bool:
        """Returns whether the server takes batches now; see `Client.ready`."""
        return await self._probe(_calls.ready())

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
