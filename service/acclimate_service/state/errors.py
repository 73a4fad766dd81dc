"""What can go wrong between the service and Redis."""

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

Effect: TypeAlias = Literal[False, "unknown"]
"""Whether a change that was not confirmed may still be, or become, part of the client's history."""


class StateError(Exception):
    """Root of this room's errors. `committed` is False, or "unknown" where the change may still land."""

    def __init__(self, detail: str, committed: Effect = False) -> None:
        super().__init__(detail)
        self.committed = committed


KEPT_CHANGING: Final = "other replicas kept changing this client's state; send the request again"


class Doubt:
    """Whether an earlier try of a change may still land; errors raised in its `with` block then say so too."""

    def __init__(self) -> None:
        self.committed: Effect = False

    def learn(self, committed: Effect) -> None:
        """Remember what one try left open."""
        self.committed = self.committed or committed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StateError):
            error.committed = error.committed or self.committed


class StoreUnavailable(StateError):
    """Redis did not answer, or cannot take changes at present."""


class StoreFull(StateError):
    """Redis reached its `maxmemory` and refused a script that needs more."""


class StateCorrupt(StateError):
    """A stored state failed its verification; unless a newer release wrote it, only a reset or a DELETE helps."""


class TooManyClients(StoreFull):
    """The tenant has as many clients as it may; no further one begins.

    Args:
        most: that it may have.
    """

    def __init__(self, most: int) -> None:
        super().__init__(
            f"there are {most} clients, which is the most (ACCLIMATE_MAX_CLIENTS); "
            "delete some, or wait until idle ones expire"
        )
        self.most = most


class TooManyBytes(StoreFull):
    """The clients of the tenant take as many bytes as they may; no further one begins, and none grows.

    Args:
        taken: bytes of Redis's memory.
        most: that they may take.
    """

    def __init__(self, taken: int, most: int) -> None:
        super().__init__(
            f"the clients take {taken:,} bytes of {most:,} (ACCLIMATE_TENANT_BYTES), "
            "which leaves too few for this one; delete some, or wait until idle ones expire"
        )
        self.left = max(0, most - taken)
        self.most = most


class RateExceeded(StateError):
    """An owner of clients sent more images than it may for now.

    Args:
        images: that are refused.
        left, quota, window_s: images that it could send now, and in so many seconds.
        wait_s: seconds until these would be taken.
    """

    def __init__(self, images: int, *, left: int, quota: int, window_s: int, wait_s: float) -> None:
        super().__init__(
            f"{images} images are more than the {left} that are left of {quota} in {window_s} s "
            "(ACCLIMATE_TENANT_ROWS_PER_MINUTE); "
            f"they would be taken in {wait_s:.1f} s"
        )
        self.left = left
        self.quota = quota
        self.window_s = window_s
        self.wait_s = wait_s


class ForeignValue(StoreUnavailable):
    """A key has a value of another type than the service writes; only a DELETE of its client helps."""


class JournalFull(StateError):
    """The journal is at its cap, and no snapshot could make it shorter."""


class StateUnreadable(StateError):
    """A batch of the journal cannot be computed again; it is never skipped, since it may have been acknowledged."""


class StepFailed(StateError):
    """The adapter failed on this batch; the cause has the details."""


class Contended(StateError):
    """Other replicas' changes of this client kept coming between."""


class ClientDeleted(StateError):
    """The client was deleted while the request was under way."""


class ClientUnknown(StateError):
    """There is no such client."""


class VersionUnknown(StateError):
    """No state of this version is kept."""


class Paused(StateError):
    """The client's batches are not folded in, until that is resumed."""


class OutOfOrder(StateError):
    """A batch of this client with this number or a higher one was applied before."""


class KeyReused(StateError):
    """The idempotency key was used with another content."""


class KeyUsedBeforeDelete(StateError):
    """The idempotency key was used before the client was deleted."""


class OtherModel(StateError):
    """The idempotency key was used for another model, which is known by its scope, and whose answer is not stored."""

    def __init__(self, detail: str, model: str) -> None:
        super().__init__(detail, "unknown")
        self.model = model


class RequestRunning(StateError):
    """The request is being computed by another replica, which has `retry_after_ms` to finish it."""

    def __init__(self, detail: str, retry_after_ms: int) -> None:
        super().__init__(detail, "unknown")
        self.retry_after_ms = retry_after_ms


class StoreUnfit(StateError):
    """This Redis would lose state that was acknowledged; `problems` lists every reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("this Redis cannot keep client state safely: " + "; ".join(problems))
        self.problems = tuple(problems)
