"""The blocking client."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from acclimate_client import _calls
from acclimate_client._checks import Labels
from acclimate_client._images import Images, Layout
from acclimate_client._transport import Transport
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


class Client(Transport):
    """Talks to an Acclimate service; may be shared by threads. Close it, or use it as a context manager.

    Failures that may pass (connection, timeout, overload, a key still running) are tried again under the
    same idempotency key, so a batch is applied once however often it is sent.

    Args:
        base_url: http or https URL of the service, e.g. "http://127.0.0.1:8000".
        timeout: Seconds that one attempt may wait to connect, and for each piece of the reply.
        max_retries: Attempts after the first one. Waits grow from 0.25 s to 8 s, with full jitter; Retry-After is
            honoured up to 60 s, above that the error is raised at once.
        headers: Sent with every request, e.g. for a proxy.
        model: Name of the model whose clients are meant, where the service has several; None for the default one.
        api_key: Key of the tenant whose clients are meant; None where the service asks for none.

    Raises:
        ValueError: An argument is outside its range.
    """

    def predict(
        self,
        client_id: str,
        images: Images,
        *,
        adapt: bool = True,
        probabilities: bool = False,
        batch_number: int | None = None,
        idempotency_key: str | None = None,
        layout: Layout | None = None,
        timeout: float | None = None,
    ) -> Prediction:
        """Predicts one batch and, unless told otherwise, adapts the client's model to it.

        Args:
            client_id: Whose model: 1 to 128 letters, digits and `. _ ~ -`, a letter or digit first.
            images: One array or list of arrays, uint8 in 0..255 or floating in 0..1, [B, H, W], [B, H, W, C] or
                [B, C, H, W]; or a list of PNG, JPEG, WebP, GIF, BMP or TIFF files given as paths, bytes
                or PIL images.
            adapt: Whether the batch changes the client's state.
            probabilities: Whether the reply holds the whole posterior.
            batch_number: Position of the batch in the client's stream, an int in 1..2^53-1. Where an equal or later
                one was applied before, the batch is refused; numbers that were left out are told by the signal
                `skipped_batches`. None, the only choice with `adapt=False`: batches are applied as they come.
            idempotency_key: 1 to 255 printable ASCII characters; default a new UUID. Pass the key of an earlier call
                with the same images to learn what became of it: the batch is not applied again.
            layout: Order of the axes of arrays, for shapes that fit the model in two ways.
            timeout: As in the constructor, for this call; also the deadline after which the server drops the work.

        Raises:
            TypeError, ValueError: An argument is of no accepted type or out of range. Nothing was sent.
            OSError: An image file cannot be read. Nothing was sent.
            OutOfOrderError: A batch of this or a later number was applied before.
            AcclimateClientError: What became of the request; see `acclimate_client.errors`.
        """
        sending = self._settings.sending(idempotency_key, layout, timeout)
        call = _calls.predict(
            client_id, images, adapt=adapt, probabilities=probabilities, batch_number=batch_number, **sending
        )
        return self._run(call)

    def get(self, client_id: str) -> ClientInfo:
        """Describes a client.

        Raises:
            ClientUnknownError: The server holds no state for it.
            AcclimateClientError: Any other failure.
        """
        return self._run(_calls.get(client_id))

    def reset(self, client_id: str, *, idempotency_key: str | None = None) -> ResetResult:
        """Puts a client back to the global model; a repeated key does not wipe batches applied since.

        Raises:
            ClientUnknownError: The server holds no state for it.
            AcclimateClientError: Any other failure.
        """
        return self._run(_calls.reset(client_id, idempotency_key=idempotency_key))

    def rollback(
        self, client_id: str, version: int | None = None, *, idempotency_key: str | None = None
    ) -> RollbackResult:
        """Lets a client go on from an earlier state, with the adapter that it had then.

        What was kept of that version and since is forgotten, so that a next call goes back further.

        Args:
            client_id: Who.
            version: One of those that `get` lists in `state.kept`; None for the newest of them.
            idempotency_key: As in `predict`; a repeated key does not go back again.

        Raises:
            TypeError, ValueError: `version` is no whole number from 1 on. Nothing was sent.
            ClientUnknownError: The server holds no state for it.
            VersionUnknownError: The server keeps no such version.
            AcclimateClientError: Any other failure.
        """
        return self._run(_calls.rollback(client_id, version, idempotency_key=idempotency_key))

    def configure(
        self, client_id: str, adapter: str, /, *, idempotency_key: str | None = None, **hyperparameters: Any
    ) -> ConfigureResult:
        """Chooses the adapter of a client, which restarts unless it has this very adapter already.

        Args:
            client_id: Whose adapter; the client need not have sent a batch before.
            adapter: Name of an adapter, or of a chain such as "atp+fedcal"; see `adapters`.
            idempotency_key: As in `predict`; a repeated key does not reset the client again.
            hyperparameters: Those that shall not have their defaults; for a chain, a mapping under each part's name.

        Raises:
            TypeError, ValueError: An argument is of no accepted type or out of range. Nothing was sent.
            InvalidConfigurationError: There is no such adapter or hyper-parameter, or one is out of range.
            UnavailableAdapterError: The model lacks something that the adapter needs.
            AcclimateClientError: Any other failure.
        """
        return self._run(_calls.configure(client_id, adapter, hyperparameters, idempotency_key=idempotency_key))

    def pause(self, client_id: str, *, idempotency_key: str | None = None) -> ConfigureResult:
        """Lets batches of a client be answered from its state as it is, and not be folded in, until `resume`.

        A reset and another adapter leave it paused; labels are counted and not learned from.

        Args:
            client_id: Who; the client need not have sent a batch before.
            idempotency_key: As in `predict`; a repeated key does not pause again.

        Raises:
            AcclimateClientError: What became of the request; see `acclimate_client.errors`.
        """
        return self._run(_calls.adaptation(client_id, "paused", idempotency_key=idempotency_key))

    def resume(self, client_id: str, *, idempotency_key: str | None = None) -> ConfigureResult:
        """Lets a client adapt again after `pause`, from the state that it has.

        Args:
            client_id, idempotency_key: As in `pause`.

        Raises:
            AcclimateClientError: What became of the request; see `acclimate_client.errors`.
        """
        return self._run(_calls.adaptation(client_id, "running", idempotency_key=idempotency_key))

    def enroll(
        self,
        client_id: str,
        images: Images,
        labels: Labels,
        *,
        idempotency_key: str | None = None,
        layout: Layout | None = None,
        timeout: float | None = None,
    ) -> EnrolResult:
        """Lets a client restart from labelled images of its own, under an adapter that takes them.

        Args:
            client_id: Whose images.
            images: As in `predict`.
            labels: Class index or class name of each image.
            idempotency_key, layout, timeout: As in `predict`.

        Raises:
            TypeError, ValueError: An argument is of no accepted type or out of range. Nothing was sent.
            OSError: An image file cannot be read. Nothing was sent.
            EnrolmentUnsupportedError: The client's adapter takes no labelled images: configure it first.
            AcclimateClientError: Any other failure.
        """
        sending = self._settings.sending(idempotency_key, layout, timeout)
        return self._run(_calls.enroll(client_id, images, labels, **sending))

    def feedback(
        self,
        client_id: str,
        rows: Iterable[LabelledRow],
        *,
        idempotency_key: str | None = None,
        timeout: float | None = None,
    ) -> FeedbackResult:
        """Tells the true classes of images predicted before, so that the service learns whether adaptation helps.

        Args:
            client_id: Whose images.
            rows: 1 to 10,000 rows, of any number of predictions. Neither whether nor when a row is told may depend on
                which prediction is right.
            idempotency_key, timeout: As in `predict`.

        Raises:
            TypeError, ValueError: An argument is of no accepted type or out of range. Nothing was sent.
            ClientUnknownError: The server holds no state for it.
            InvalidFeedbackError: A label is no class of the model.
            GuardOffError: The operator keeps no record of predictions.
            AcclimateClientError: Any other failure.
        """
        limit = self._settings.limit(timeout)
        return self._run(_calls.feedback(client_id, rows, idempotency_key=idempotency_key, timeout=limit))

    def asks(self, client_id: str | None = None) -> Iterator[Ask]:
        """Yields the images whose labels are asked for, of one client or of all, page by page as they are wanted.

        Those of clients whose questions changed last come first, and of each client the newest. A question that opens
        meanwhile may be missed, and one that is answered or expires may still come: its label is `duplicate` or
        `unknown`. Answer all of them, or leave some by chance: never by which prediction is right.

        Args:
            client_id: Whose; None for those of all clients.

        Raises:
            ClientUnknownError: The server holds no state for it.
            GuardOffError: The operator keeps no record of predictions.
            AcclimateClientError: Any other failure.
        """
        cursor: str | None = ""
        while cursor is not None:
            asked, cursor = self._run(_calls.asks(client_id, cursor))
            yield from asked

    def feedback_images(
        self,
        client_id: str,
        images: Images,
        labels: Labels,
        *,
        idempotency_key: str | None = None,
        layout: Layout | None = None,
        timeout: float | None = None,
    ) -> FeedbackResult:
        """Tells the true classes of images that come along, for rows that are not remembered or were never predicted.

        Both predictions are made now, from the client's present state, which the images do not change; an adapter that
        learns from labels learns these. An image told twice, or told as a row too, counts twice.

        Args:
            client_id, images, labels, idempotency_key, layout, timeout: As in `enroll`. Neither whether nor when an
                image is told may depend on which prediction is right.

        Raises:
            TypeError, ValueError, OSError: As in `enroll`. Nothing was sent.
            ClientUnknownError, GuardOffError: As in `feedback`.
            InvalidLabelsError: A label is no class of the model.
            AcclimateClientError: Any other failure.
        """
        sending = self._settings.sending(idempotency_key, layout, timeout)
        return self._run(_calls.feedback_images(client_id, images, labels, **sending))

    def export_state(self, client_id: str) -> bytes:
        """Fetches the state of a client, to be kept or to be given to another one.

        Raises:
            ClientUnknownError: The server holds no state for it.
            AcclimateClientError: Any other failure.
        """
        return self._run(_calls.export_state(client_id))

    def import_state(
        self, client_id: str, data: bytes, *, replaces: int | None = None, idempotency_key: str | None = None
    ) -> ImportResult:
        """Lets a client go on from an exported state. Its adapter and model must be those of the state.

        Args:
            client_id: Who goes on; the client need not have sent a batch before.
            data: What `export_state` returned.
            replaces: Version that the client's state must have; None replaces any.
            idempotency_key: As in `predict`.

        Raises:
            StateMismatchError: The state is of another adapter or model: configure the client first.
            InvalidStateError: The bytes are not a sound state.
            PreconditionFailedError: The client's state has another version.
            AcclimateClientError: Any other failure.
        """
        return self._run(_calls.import_state(client_id, data, replaces=replaces, idempotency_key=idempotency_key))

    def delete(self, client_id: str) -> None:
        """Removes a client and all that was learned for it; no error if there is none.

        Raises:
            AcclimateClientError: The client may still exist.
        """
        self._run(_calls.delete(client_id))

    def clients(
        self,
        cursor: str | None = None,
        *,
        limit: int = 100,
        adapter: str | None = None,
        active_since: datetime | None = None,
        verdict: str | None = None,
    ) -> ClientPage:
        """Lists clients that have a state, in no order: those that fit, one page of them.

        Args:
            cursor: `next` of the page before; None for the first. It is of no use once Redis was started again.
            limit: Most clients of a page, 10..1000; it may have fewer, or none, though more pages follow.
            adapter: Name of the adapter that they have; None for any.
            active_since: When they changed last at the earliest, with its zone; None for any time.
            verdict: What their labels show, trusted, undecided or harmful; None for any.

        Raises:
            TypeError, ValueError: An argument is of no accepted type, or a time without zone. Nothing was sent.
            AcclimateClientError: Any other failure; a client that comes or goes meanwhile may be missed.
        """
        call = _calls.clients(cursor, limit=limit, adapter=adapter, active_since=active_since, verdict=verdict)
        return self._run(call)

    def export_states(
        self,
        cursor: str | None = None,
        *,
        limit: int = 100,
        adapter: str | None = None,
        active_since: datetime | None = None,
        verdict: str | None = None,
    ) -> StatePage:
        """Fetches the states of a page of clients, in no order; whose state cannot be read is named.

        Args:
            cursor, limit, adapter, active_since, verdict: As of `clients`. All states of a page are in memory at once.

        Raises:
            TypeError, ValueError: As of `clients`. Nothing was sent.
            AcclimateClientError: Any other failure; the same page can be asked for again.
        """
        wanted = _calls.Wanted(limit=limit, adapter=adapter, active_since=active_since, verdict=verdict)
        return self._run(_calls.export_states(cursor, **wanted))

    def delete_clients(
        self,
        cursor: str | None = None,
        *,
        everyone: bool = False,
        limit: int = 100,
        adapter: str | None = None,
        active_since: datetime | None = None,
        verdict: str | None = None,
    ) -> DeletedClients:
        """Removes a page of clients and all that was learned for them; who stays is named.

        Args:
            everyone: Whether all clients are meant, where nothing else says which.
            cursor, limit, adapter, active_since, verdict: As of `clients`.

        Raises:
            TypeError, ValueError: As of `clients`, or nothing says which clients. Nothing was sent.
            AcclimateClientError: Any of them may be gone or still exist; to ask again does no harm.
        """
        wanted = _calls.Wanted(limit=limit, adapter=adapter, active_since=active_since, verdict=verdict)
        return self._run(_calls.delete_clients(cursor, everyone=everyone, **wanted))

    def timeline(self, client_id: str, *, since: datetime | None = None, resolution: float | None = None) -> Timeline:
        """Fetches what became of a client over time.

        Args:
            client_id: Who.
            since: Leaves out what was before, an aware datetime.
            resolution: Seconds in 0..86400: what falls into the same so many becomes one point.

        Raises:
            TypeError, ValueError: An argument is of no accepted type or out of range. Nothing was sent.
            ClientUnknownError: The server holds no state for it.
            AcclimateClientError: Any other failure.
        """
        return self._run(_calls.timeline(client_id, since, resolution))

    def watch(self, client_id: str, *, after: int | None = None) -> Iterator[TimelinePoint]:
        """Yields what becomes of a client, as it happens, for as long as one asks.

        A connection that is lost is opened again, and what came meanwhile is told then.

        Args:
            client_id: Who.
            after: Version of the client's state after which to begin; None for the present one.

        Raises:
            ClientUnknownError: The server holds no state for it, or no longer.
            AcclimateClientError: Any other failure that a retry did not help.
        """
        return self._watch(_calls.watch(client_id), after)

    def models(self) -> tuple[ModelInfo, ...]:
        """Lists the models the server offers.

        Raises:
            AcclimateClientError: The list could not be fetched.
        """
        return self._run(_calls.models())

    def evidence(self, model: str) -> ModelEvidence:
        """Fetches what the labels of all clients say of each adapter of a model.

        Raises:
            ValueError: `model` is no name of a model. Nothing was sent.
            AcclimateClientError: It could not be fetched.
        """
        return self._run(_calls.evidence(model))

    def adapters(self) -> tuple[AdapterDescription, ...]:
        """Lists the adapters and chains, those included that the model cannot be served with.

        Raises:
            AcclimateClientError: The list could not be fetched.
        """
        return self._run(_calls.adapters())

    def live(self) -> bool:
        """Returns whether the server answers at all. Tries once.

        Raises:
            AcclimateClientError: Something answers, but not an Acclimate server.
        """
        return self._probe(_calls.live())

    def ready(self) -> bool:
        """Returns whether the server takes batches now. Tries once.

        Raises:
            AcclimateClientError: Something answers, but not an Acclimate server.
        """
        return self._probe(_calls.ready())
