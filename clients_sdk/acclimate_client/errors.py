"""Everything the client raises once a request was sent; junk arguments are `TypeError` and `ValueError`.

AcclimateClientError
  + ConnectionFailed
  + Timeout
  + UnexpectedReplyError
  + ProblemError

Below `ProblemError` there is one class for each code of the server, in the order of their statuses.
"""

import re
from types import MappingProxyType
from typing import Literal

Committed = bool | Literal["unknown"]


class AcclimateClientError(Exception):
    """Root of all errors of this package.

    Attributes:
        attempts: Requests sent for this call, the first one included.
        idempotency_key: Key that all of them carried. Repeating the call with it cannot apply the batch twice;
            None where the call needs none.
        retryable: Whether the same call may succeed later.
        state_committed: Whether the client's state changed. "unknown" if any attempt may have changed it.
    """

    attempts: int = 0
    idempotency_key: str | None = None
    retryable: bool = False
    state_committed: Committed = "unknown"


class ConnectionFailed(AcclimateClientError):
    """The connection could not be made, or broke before the reply was complete."""


class Timeout(AcclimateClientError):
    """The server did not answer within the timeout."""


class UnexpectedReplyError(AcclimateClientError):
    """The reply reports success but is not in the format of this API."""


class ProblemError(AcclimateClientError):
    """The server refused the request. Codes that this version does not know raise this class itself.

    Attributes:
        code: Stable name of the problem, or `http_<status>` when the reply was not a problem document.
        status: HTTP status.
        detail: What was wrong and what is accepted.
        request_id: Finds the request in the server's log.
        retry_after: Seconds the server asks to wait, None if it does not say.
    """

    def __init__(
        self,
        code: str,
        status: int,
        detail: str,
        retryable: bool,
        state_committed: Committed = "unknown",
        request_id: str = "",
        retry_after: float | None = None,
    ) -> None:
        # Every argument is in `args`, so the error survives pickling on its way out of a worker process.
        super().__init__(code, status, detail, retryable, state_committed, request_id, retry_after)
        self.code = code
        self.status = status
        self.detail = detail
        self.retryable = retryable
        self.state_committed = state_committed
        self.request_id = request_id
        self.retry_after = retry_after

    def __str__(self) -> str:
        request = f" [request {self.request_id}]" if self.request_id else ""
        return f"{self.code} ({self.status}): {self.detail}{request}"


class MalformedBodyError(ProblemError):
    """`malformed_body` (400): the body cannot be parsed as the type it declares."""


class MalformedRequestError(ProblemError):
    """`malformed_request` (400): what was sent is no HTTP that the server reads."""


class UnsupportedError(ProblemError):
    """`unsupported` (400): the service does not speak this extension of the inference protocol."""


class UnauthorizedError(ProblemError):
    """`unauthorized` (401): the service asks for a key, and got none that is valid now."""


class ScopeMissingError(ProblemError):
    """`scope_missing` (403): the key is not good for this call."""


class OriginNotAllowedError(ProblemError):
    """`origin_not_allowed` (403): a web page of another origin may not use the service."""


class ImportOffError(ProblemError):
    """`import_off` (403): the operator lets nobody put states in."""


class AdapterNotAllowedError(ProblemError):
    """`adapter_not_allowed` (403): the operator does not offer this adapter."""


class NotFoundError(ProblemError):
    """`not_found` (404): the server has no such route."""


class ClientUnknownError(ProblemError):
    """`client_unknown` (404): the server holds no state for this client."""


class VersionUnknownError(ProblemError):
    """`version_unknown` (404): the server keeps no such earlier state of this client."""


class MethodNotAllowedError(ProblemError):
    """`method_not_allowed` (405): the route does not take this method."""


class HeadTooSlowError(ProblemError):
    """`head_too_slow` (408): the head of the request did not come in time."""


class RequestRunningError(ProblemError):
    """`request_running` (409): a request with the same idempotency key is still running."""


class ConflictError(ProblemError):
    """`conflict` (409): other replicas kept changing the client's state first."""


class ClientDeletedError(ProblemError):
    """`client_deleted` (409): the client was deleted while the request ran."""


class KeyUsedBeforeDeleteError(ProblemError):
    """`key_used_before_delete` (409): the idempotency key belongs to the client's previous life."""


class OtherModelError(ProblemError):
    """`other_model` (409): the batch of this key was applied to another model, and its answer is gone."""


class VersionNotLoadedError(ProblemError):
    """`version_not_loaded` (409): a replica has not loaded a version that clients are to be answered by."""


class VersionInUseError(ProblemError):
    """`version_in_use` (409): a version that is to be unloaded answers clients."""


class OutOfOrderError(ProblemError):
    """`out_of_order` (409): a batch of this or a later number was applied before."""


class StateMismatchError(ProblemError):
    """`state_mismatch` (409): the imported state is of another adapter or model: configure the client first."""


class GuardOffError(ProblemError):
    """`guard_off` (409): the operator keeps no record of predictions, so there is nothing to compare labels with."""


class TimelineOffError(ProblemError):
    """`timeline_off` (409): the operator keeps no record of what becomes of clients."""


class ImagesOffError(ProblemError):
    """`images_off` (409): the operator keeps no images of clients."""


class PreconditionFailedError(ProblemError):
    """`precondition_failed` (412): the client's state has another version than the one to be replaced."""


class BodyTooLargeError(ProblemError):
    """`body_too_large` (413): the body has more bytes than the server takes."""


class TooManyImagesError(ProblemError):
    """`too_many_images` (413): the batch has more images than the server takes."""


class UnsupportedMediaTypeError(ProblemError):
    """`unsupported_media_type` (415): the server does not read this content type."""


class HostNotAllowedError(ProblemError):
    """`host_not_allowed` (421): the service does not answer under this name."""


class InvalidClientIdError(ProblemError):
    """`invalid_client_id` (422): the client id holds characters that are not allowed, or is too long."""


class InvalidRequestError(ProblemError):
    """`invalid_request` (422): a header or query parameter is out of range."""


class EmptyBatchError(ProblemError):
    """`empty_batch` (422): the batch holds no image."""


class WrongShapeError(ProblemError):
    """`wrong_shape` (422): the images do not have the model's size or channels."""


class AmbiguousLayoutError(ProblemError):
    """`ambiguous_layout` (422): the shape fits both NHWC and NCHW: pass `layout`."""


class AmbiguousDtypeError(ProblemError):
    """`ambiguous_dtype` (422): the numbers may be 0..255 or 0..1."""


class WrongDtypeError(ProblemError):
    """`wrong_dtype` (422): the array is neither uint8 nor floating."""


class OutOfRangeError(ProblemError):
    """`out_of_range` (422): floats lie outside 0..1."""


class NonFiniteError(ProblemError):
    """`non_finite` (422): the batch holds NaN or infinity."""


class TooManyPixelsError(ProblemError):
    """`too_many_pixels` (422): an image has more pixels than the server decodes."""


class UndecodableImageError(ProblemError):
    """`undecodable_image` (422): an image is truncated, or neither PNG nor JPEG."""


class KeyReusedError(ProblemError):
    """`key_reused` (422): the idempotency key was used with another body."""


class InvalidConfigurationError(ProblemError):
    """`invalid_configuration` (422): there is no such adapter, or a hyper-parameter is unknown or out of range."""


class UnavailableAdapterError(ProblemError):
    """`unavailable_adapter` (422): the model lacks something that the adapter needs."""


class StepTooCostlyError(ProblemError):
    """`step_too_costly` (422): a step would take longer than the operator accepts; fewer images may do."""


class EnrolmentUnsupportedError(ProblemError):
    """`enrolment_unsupported` (422): the client's adapter takes no labelled images."""


class InvalidLabelsError(ProblemError):
    """`invalid_labels` (422): not every image has one label that is a class."""


class InvalidFeedbackError(ProblemError):
    """`invalid_feedback` (422): there are no rows or too many, or one is not a request id, a row and a class."""


class VersionUnfitError(ProblemError):
    """`version_unfit` (422): a version must not be served, as by its golden batch."""


class InvalidStateError(ProblemError):
    """`invalid_state` (422): the imported bytes are not a sound state of the client's adapter."""


class TooManyRequestsError(ProblemError):
    """`too_many_requests` (429): the server has more work than it accepts."""


class RateExceededError(ProblemError):
    """`rate_exceeded` (429): the tenant has sent as many images as it may for now."""


class HeadTooLargeError(ProblemError):
    """`head_too_large` (431): the target and the headers of the request are too long."""


class InternalError(ProblemError):
    """`internal` (500): the server failed."""


class StepFailedError(ProblemError):
    """`step_failed` (500): the adapter failed on this batch."""


class TooManyConnectionsError(ProblemError):
    """`too_many_connections` (503): the replica has no room for another connection."""


class StoreUnavailableError(ProblemError):
    """`store_unavailable` (503): Redis does not answer, so the batch cannot be made durable."""


class StateCorruptError(ProblemError):
    """`state_corrupt` (503): the client's stored state fails its checks.

    If a newer release of the service wrote it, a replica of that one goes on; else reset or delete the client.
    """


class StateUnreadableError(ProblemError):
    """`state_unreadable` (503): the client's state cannot be computed again from its journal: only a reset helps."""


class JournalFullError(ProblemError):
    """`journal_full` (503): the client's journal takes no batch until a snapshot of its state succeeds."""


class DeadlineExceededError(ProblemError):
    """`deadline_exceeded` (504): the work expired before it began, and changed nothing."""


class StoreFullError(ProblemError):
    """`store_full` (507): Redis is out of memory and refused the batch."""


def _code(kind: type[ProblemError]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__.removesuffix("Error")).lower()


PROBLEMS: MappingProxyType[str, type[ProblemError]] = MappingProxyType(
    {_code(kind): kind for kind in ProblemError.__subclasses__()}
)
"""Error class of each code the server may answer with: each is named after its code."""
