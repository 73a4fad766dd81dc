"""Whether a failed attempt is followed by another, and when. Nothing here sends or waits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import httpx

from acclimate_client._calls import Call
from acclimate_client._problems import from_httpx
from acclimate_client.errors import AcclimateClientError, ProblemError
from acclimate_client.results import Prediction

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
