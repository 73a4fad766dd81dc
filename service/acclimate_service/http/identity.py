"""The names that requests come with: client ids, request ids, idempotency keys."""

import re
import uuid

from acclimate_service.errors import Problem
from acclimate_service.state import ClientScope

_REQUEST = re.compile(r"[A-Za-z0-9._-]{1,128}")
_KEY = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,253}[\x21-\x7e])?")


def client_scope(text: str, tenant: str) -> ClientScope:
    """The client of a tenant by its id, if that is valid; no other may reach a Redis key.

    Raises:
        Problem: `invalid_client_id`.
    """
    try:
        return ClientScope(text, tenant)
    except ValueError as error:
        raise Problem("invalid_client_id", str(error)) from error


def new_request_id() -> str:
    """An id that no other request has; labels name rows by it."""
    return uuid.uuid4().hex


def caller_request_id(text: str | None) -> str | None:
    """The id that the caller gave its request, for logs, if it is a sound one; many requests may have the same."""
    return text if text is not None and _REQUEST.fullmatch(text) else None


def idempotency_key(text: str | None) -> str | None:
    """A valid idempotency key, or None when the caller sent none.

    Raises:
        Problem: `invalid_request`.
    """
    if text is None or _KEY.fullmatch(text):
        return text
    raise Problem("invalid_request", "an Idempotency-Key is 1 to 255 printable ASCII characters")
