"""Arguments to what is sent: each is checked before a request is made of it."""

import math
import operator
import re
import uuid
from collections.abc import Iterable
from datetime import datetime
from typing import Any, TypeAlias

import httpx

from acclimate_client.evidence import Class, LabelledRow

Labels: TypeAlias = Iterable[Class]

CLIENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
IDEMPOTENCY_KEY = re.compile(r"[!-~]([ -~]{0,253}[!-~])?")  # spaces at the ends do not survive in a header
API_KEY = re.compile(r"[!-~]+")
LONGEST_DEADLINE = 600.0  # seconds the server lets a request ask for
LAST_BATCH_NUMBER = 2**53 - 1  # the largest that every JSON reader and Lua keep exact
MOST_ROWS = 10_000  # labelled rows the server takes at once


def check_timeout(timeout: float) -> None:
    """Raises ValueError unless `timeout` is a positive, finite number of seconds."""
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout}; accepted are seconds above 0")


def check_url(base_url: str) -> None:
    """Raises ValueError unless `base_url` is an http or https URL with a host."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"base_url is {base_url!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"base_url is {base_url!r}; accepted is e.g. 'http://127.0.0.1:8000'")


def check_api_key(api_key: str) -> None:
    """Raises ValueError unless `api_key` can be sent in a header; it is not repeated, as errors are logged."""
    if not API_KEY.fullmatch(api_key):
        raise ValueError("api_key holds something else than printable ASCII characters, or nothing")


def client_path(client_id: str) -> str:
    """Returns the path of a client."""
    if not CLIENT_ID.fullmatch(client_id):
        raise ValueError(
            f"client_id is {client_id!r}; accepted are 1 to 128 letters, digits and . _ ~ -, a letter or digit first"
        )
    return f"/clients/{client_id}"


def model_path(name: str) -> str:
    """Returns the path of a model."""
    if not MODEL_NAME.fullmatch(name):
        raise ValueError(f"model is {name!r}; accepted are 1 to 64 letters, digits and . _ -, a letter or digit first")
    return f"/models/{name}"


def key(idempotency_key: str | None) -> str:
    """Returns the key of a call, a new one if None is given."""
    chosen = str(uuid.uuid4()) if idempotency_key is None else idempotency_key
    if not IDEMPOTENCY_KEY.fullmatch(chosen):
        raise ValueError(
            f"idempotency_key is {chosen!r}; accepted are 1 to 255 printable ASCII characters, no space at either end"
        )
    return chosen


def deadline(timeout: float) -> dict[str, str]:
    """Returns the header that tells the server how long the caller waits."""
    check_timeout(timeout)
    return {"X-Request-Timeout-Ms": str(math.ceil(min(timeout, LONGEST_DEADLINE) * 1000))}


def batch_number(number: int | None, adapt: bool) -> dict[str, str]:
    """Returns the header that numbers a batch, none for None."""
    if number is None:
        return {}
    if not adapt:
        raise ValueError(f"batch_number is {number!r}, but with adapt=False no batch is counted; pass None")
    if type(number) is not int or not 1 <= number <= LAST_BATCH_NUMBER:  # a bool is an int, too
        raise ValueError(f"batch_number is {number!r}; accepted are None and an int in 1..{LAST_BATCH_NUMBER}")
    return {"X-Batch-Number": str(number)}


def version(number: int) -> int:
    """Returns the version of a state, if it is one."""
    if type(number) is not int or number < 1:
        raise ValueError(f"version is {number!r}; accepted are None and an int from 1 on")
    return number


def moment(time: datetime | None) -> str | None:
    """Returns a time as RFC 3339 has it."""
    if time is not None and time.tzinfo is None:
        raise ValueError(f"active_since is {time!r}; accepted is a time with its zone, such as datetime.now(UTC)")
    return None if time is None else time.isoformat()


def flag(value: bool) -> str:
    """Returns a truth value as a query parameter."""
    return "true" if value else "false"


def listed(labels: Labels) -> list[int | str]:
    """Returns labels as JSON has them; raises TypeError for what is no class."""
    if isinstance(labels, str | bytes):
        raise TypeError(f"labels is a {type(labels).__name__}; give a list of class indices and class names")
    return [_class(label) for label in labels]


def labelled(rows: Iterable[LabelledRow]) -> list[dict[str, Any]]:
    """Returns labelled rows as JSON has them; raises TypeError and ValueError for what is none, too few or too many."""
    told = list(rows)
    if not 1 <= len(told) <= MOST_ROWS:
        raise ValueError(f"there are {len(told)} rows; accepted are 1 to {MOST_ROWS} in one call")
    for position, row in enumerate(told):
        if not isinstance(row, LabelledRow):
            raise TypeError(
                f"row {position} is a {type(row).__name__}; accepted is LabelledRow(request_id, row, label)"
            )
    return [{"request_id": row.request_id, "row": operator.index(row.row), "label": _class(row.label)} for row in told]


def _class(label: Class) -> int | str:
    return label if isinstance(label, str) else operator.index(label)
