"""The client for asyncio, method for method the blocking one."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from typing import Any

from acclimate_client import _calls
from acclimate_client._checks import Labels
from acclimate_client._images import Images, Layout
from acclimate_client._transport import AsyncTransport
from acclimate_client.evidence import Ask, LabelledRow
from acclimate_client.models import AdapterDescription, ModelEvidence, ModelInfo
from acclimate_client.pages import ClientPage, DeletedClients, StatePage
from acclimate_client.results import (
    ClientInfo,
    ConfigureResult,
    EnrolResult,
    FeedbackResult,
    ImportResult,
    Prediction,
    ResetResult,
    RollbackResult,
    Timeline,
    TimelinePoint,
)


class AsyncClient(AsyncTransport):
    """Talks to an Acclimate service from one event loop. Close it, or use it as an async context manager.

    Arguments, retries and errors are those of `acclimate_client.Client`.
    """

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
        sending = self._settings.sending(idempotency_key, layout, timeout)
        call = await asyncio.to_thread(
            _calls.predict,
            client_id,
            images,
            adapt=adapt,
            probabilities=probabilities,
            batch_number=batch_number,
            **sending,
        )
        return await self._run(call)

    async def get(self, client_id: str) -> ClientInfo:
        """Describes a client; see `Client.get`."""
        return await self._run(_calls.get(client_id))

    async def reset(self, client_id: str, *, idempotency_key: str | None = None) -> ResetResult:
        """Puts a client back to the global model; see `Client.reset`."""
        return await self._run(_calls.reset(client_id, idempotency_key=idempotency_key))

    async def rollback(
        self, client_id: str, version: int | None = None, *, idempotency_key: str | None = None
    ) -> RollbackResult:
        """Lets a client go on from an earlier state; see `Client.rollback`."""
        return await self._run(_calls.rollback(client_id, version, idempotency_key=idempotency_key))

    async def configure(
        self, client_id: str, adapter: str, /, *, idempotency_key: str | None = None, **hyperparameters: Any
    ) -> ConfigureResult:
        """Chooses the adapter of a client; see `Client.configure`."""
        return await self._run(_calls.configure(client_id, adapter, hyperparameters, idempotency_key=idempotency_key))

    async def pause(self, client_id: str, *, idempotency_key: str | None = None) -> ConfigureResult:
        """Lets batches of a client be answered and not folded in; see `Client.pause`."""
        return await self._run(_calls.adaptation(client_id, "paused", idempotency_key=idempotency_key))

    async def resume(self, client_id: str, *, idempotency_key: str | None = None) -> ConfigureResult:
        """Lets a client adapt again; see `Client.resume`."""
        return await self._run(_calls.adaptation(client_id, "running", idempotency_key=idempotency_key))

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
        """Lets a client restart from labelled images of its own; see `Client.enroll`."""
        sending = self._settings.sending(idempotency_key, layout, timeout)
        return await self._run(await asyncio.to_thread(_calls.enroll, client_id, images, labels, **sending))

    async def feedback(
        self,
        client_id: str,
        rows: Iterable[LabelledRow],
        *,
        idempotency_key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as in predict
    ) -> FeedbackResult:
        """Tells the true classes of images predicted before; see `Client.feedback`."""
        limit = self._settings.limit(timeout)
        return await self._run(_calls.feedback(client_id, rows, idempotency_key=idempotency_key, timeout=limit))

    async def asks(self, client_id: str | None = None) -> AsyncIterator[Ask]:
        """Yields the images whose labels are asked for, of one client or of all; see `Client.asks`."""
        cursor: str | None = ""
        while cursor is not None:
            asked, cursor = await self._run(_calls.asks(client_id, cursor))
            for each in asked:
                yield each

    async def feedback_images(
        self,
        client_id: str,
        images: Images,
        labels: Labels,
        *,
        idempotency_key: str | None = None,
        layout: Layout | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as in predict
    ) -> FeedbackResult:
        """Tells the true classes of images that come along; see `Client.feedback_images`."""
        sending = self._settings.sending(idempotency_key, layout, timeout)
        return await self._run(await asyncio.to_thread(_calls.feedback_images, client_id, images, labels, **sending))

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

    async def clients(
        self,
        cursor: str | None = None,
        *,
        limit: int = 100,
        adapter: str | None = None,
        active_since: datetime | None = None,
        verdict: str | None = None,
    ) -> ClientPage:
        """Lists clients that have a state; see `Client.clients`."""
        call = _calls.clients(cursor, limit=limit, adapter=adapter, active_since=active_since, verdict=verdict)
        return await self._run(call)

    async def export_states(
        self,
        cursor: str | None = None,
        *,
        limit: int = 100,
        adapter: str | None = None,
        active_since: datetime | None = None,
        verdict: str | None = None,
    ) -> StatePage:
        """Fetches the states of a page of clients; see `Client.export_states`."""
        wanted = _calls.Wanted(limit=limit, adapter=adapter, active_since=active_since, verdict=verdict)
        return await self._run(_calls.export_states(cursor, **wanted))

    async def delete_clients(
        self,
        cursor: str | None = None,
        *,
        everyone: bool = False,
        limit: int = 100,
        adapter: str | None = None,
        active_since: datetime | None = None,
        verdict: str | None = None,
    ) -> DeletedClients:
        """Removes a page of clients and all that was learned for them; see `Client.delete_clients`."""
        wanted = _calls.Wanted(limit=limit, adapter=adapter, active_since=active_since, verdict=verdict)
        return await self._run(_calls.delete_clients(cursor, everyone=everyone, **wanted))

    async def timeline(
        self, client_id: str, *, since: datetime | None = None, resolution: float | None = None
    ) -> Timeline:
        """Fetches what became of a client over time; see `Client.timeline`."""
        return await self._run(_calls.timeline(client_id, since, resolution))

    def watch(self, client_id: str, *, after: int | None = None) -> AsyncIterator[TimelinePoint]:
        """Yields what becomes of a client, as it happens; see `Client.watch`."""
        return self._watch(_calls.watch(client_id), after)

    async def models(self) -> tuple[ModelInfo, ...]:
        """Lists the models the server offers; see `Client.models`."""
        return await self._run(_calls.models())

    async def evidence(self, model: str) -> ModelEvidence:
        """Fetches what labels say of the adapters of a model; see `Client.evidence`."""
        return await self._run(_calls.evidence(model))

    async def adapters(self) -> tuple[AdapterDescription, ...]:
        """Lists the adapters and chains; see `Client.adapters`."""
        return await self._run(_calls.adapters())

    async def live(self) -> bool:
        """Returns whether the server answers at all; see `Client.live`."""
        return await self._probe(_calls.live())

    async def ready(self) -> bool:
        """Returns whether the server takes batches now; see `Client.ready`."""
        return await self._probe(_calls.ready())
