"""The Content-Encoding of a request body."""

import zlib
from typing import Final

from .limits import PayloadError

_WINDOWS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Window bits by which zlib knows the form of the data."""


def window_of(content_encoding: str) -> int | None:
    """What `inflate` has to know to undo a Content-Encoding; None: there is nothing to undo.

    Raises:
        PayloadError: `unsupported_media_type`.
    """
    encoding = content_encoding.strip(" \t").lower()
    if encoding != "identity" and encoding not in _WINDOWS:
        accepted = ", ".join(("identity", *_WINDOWS))
        detail = f"Content-Encoding {encoding[:40]!r} is not accepted; send {accepted}"
        raise PayloadError("unsupported_media_type", detail)
    return _WINDOWS.get(encoding)


def inflate(data: bytes, window: int, limit: int) -> bytes:
    """Undo a Content-Encoding; the result has at most `limit` bytes.

    Raises:
        PayloadError: `body_too_large`, or `malformed_body`.
    """
    inflater = zlib.decompressobj(window)
    try:
        inflated = inflater.decompress(data, limit + 1)
    except zlib.error as error:
        raise PayloadError(
            "malformed_body", f"the body is not encoded as its Content-Encoding says: {error}"
        ) from error
    if len(inflated) > limit:
        raise too_large(limit)
    if not inflater.eof or inflater.unused_data:
        raise PayloadError("malformed_body", "the body is not one whole stream of its Content-Encoding")
    return inflated


def too_large(limit: int) -> PayloadError:
    """The error that a body of more bytes is refused with."""
    return PayloadError("body_too_large", f"a request body may have {limit} bytes here; send less at once")
