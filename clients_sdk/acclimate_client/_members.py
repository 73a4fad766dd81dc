"""Members of JSON replies to Python values. Each reader raises TypeError or ValueError for what it does not take."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from acclimate_client._problems import EXCERPT

T = TypeVar("T")


def typed(kind: type[T], value: object) -> T:
    """Returns the value if it is of this type."""
    if isinstance(value, kind):
        return value
    raise TypeError(f"expected {kind.__name__}, found {value!r}"[:EXCERPT])


def optional(kind: type[T], value: object) -> T | None:
    """Returns the value if it is of this type, or None."""
    return None if value is None else typed(kind, value)


def number(value: object) -> float:
    """Returns a JSON number, which may be written without a point."""
    return float(value) if isinstance(value, int) else typed(float, value)


def optional_number(value: object) -> float | None:
    """Returns a JSON number, or None."""
    return None if value is None else number(value)


def moment(value: object) -> datetime | None:
    """Returns an ISO 8601 time with its offset as one in UTC, or None."""
    if value is None:
        return None
    time = datetime.fromisoformat(typed(str, value))
    if time.tzinfo is None:
        raise ValueError(f"expected a time with its offset from UTC, found {value!r}"[:EXCERPT])
    return time.astimezone(UTC)


def array(values: Sequence[Any], dtype: DTypeLike) -> NDArray[Any]:
    """Returns the values as an array that cannot be written to."""
    made = np.array(values, dtype=dtype)
    made.setflags(write=False)
    return made


def measurements(value: object) -> dict[str, float | tuple[float, ...]]:
    """Returns the signals of a step by name."""
    # A measurement of an unknown kind must not cost the user the prediction it came with.
    known: dict[str, float | tuple[float, ...]] = {}
    for name, signal in typed(dict, value or {}).items():
        if isinstance(signal, list) and all(_is_measurement(item) for item in signal):
            known[name] = tuple(_measurement(item) for item in signal)
        elif _is_measurement(signal):
            known[name] = _measurement(signal)
    return known


def _is_measurement(value: object) -> bool:
    return value is None or isinstance(value, int | float)


def _measurement(value: float | None) -> float:
    # JSON has no NaN; it arrives as null.
    return math.nan if value is None else float(value)
