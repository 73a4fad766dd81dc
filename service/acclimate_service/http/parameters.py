"""What a request says beside its body: its client, headers and parameters, refused where that cannot be meant."""

import re
from functools import lru_cache
from typing import Final

from fastapi import Request

from acclimate_service.errors import Problem
from acclimate_service.state import ClientScope

_ONCE: Final = (
    "content-encoding",
    "content-type",
    "idempotency-key",
    "if-match",
    "x-batch-number",
    "x-labels",
    "x-request-timeout-ms",
    "x-tensor-dtype",
    "x-tensor-layout",
    "x-tensor-shape",
)
"""Headers that decide what a request means: one that is there twice means two things."""
_KEY: Final = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,253}[\x21-\x7e])?")
_TIMEOUT_MS: Final = re.compile(r"[0-9]{1,6}")
_LONGEST_TIMEOUT_MS: Final = 600_000
_NUMBER: Final = re.compile(r"[0-9]{1,16}")
_LARGEST_NUMBER: Final = 2**53 - 1


@lru_cache(maxsize=4096)
def client_scope(client_id: str, owner: str, tenant: str) -> ClientScope:
    """The client of an owner by its id, if that is valid; no other may reach a Redis key.

    This is the one place where ids of callers become ids of clients. `/` is in no id and in no owner's name, so neither
    another owner's clients nor those of nobody can be named.

    Raises:
        Problem: `invalid_client_id`.
    """
    try:
        plain = ClientScope(client_id, tenant)
        if plain.owner:
            raise ValueError(f"client id is {client_id[:40]!r}; an id holds no '/'")
        return ClientScope(f"{owner}/{client_id}", tenant) if owner else plain
    except ValueError as error:
        raise Problem("invalid_client_id", str(error)) from error


def check_once(http: Request) -> None:
    """Refuse headers that are there twice and may mean two things; raises Problem."""
    for name in _ONCE:
        if len(http.headers.getlist(name)) > 1:
            raise Problem("invalid_request", f"the header {name.title()} is there more than once")


def check_query(http: Request, accepted: tuple[str, ...]) -> None:
    """Refuse parameters of a request that are none, or are there twice; raises Problem."""
    names = [name for name, _ in http.query_params.multi_items()]
    for name in names:
        if name not in accepted:
            known = ", ".join(accepted) or "none"
            raise Problem("invalid_request", f"there is no parameter {name[:40]!r} here; accepted are: {known}")
        if names.count(name) > 1:
            raise Problem("invalid_request", f"the parameter {name!r} is there more than once")


def sound_key(key: str) -> str:
    """An idempotency key as it is; raises Problem."""
    if not _KEY.fullmatch(key):
        raise Problem("invalid_request", "the key of a request is 1 to 255 printable ASCII characters")
    return key


def sound_timeout(text: str) -> int:
    """Milliseconds that a request may take; raises Problem."""
    if not (_TIMEOUT_MS.fullmatch(text) and 1 <= int(text) <= _LONGEST_TIMEOUT_MS):
        detail = f"X-Request-Timeout-Ms is a whole number of milliseconds from 1 to {_LONGEST_TIMEOUT_MS}"
        raise Problem("invalid_request", detail)
    return int(text)


def sound_number(text: str, adapt: bool) -> int:
    """Place of a batch in the client's stream; raises Problem."""
    if not adapt:
        raise Problem("invalid_request", "X-Batch-Number is for batches that are folded in, not for adapt=false")
    number = int(text) if _NUMBER.fullmatch(text) else 0
    if not 1 <= number <= _LARGEST_NUMBER:
        raise Problem("invalid_request", f"X-Batch-Number is a whole number from 1 to {_LARGEST_NUMBER}")
    return number
