"""Media types of request bodies."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from .limits import PayloadError

MEDIA_TYPES: Final = (
    "application/json",
    "multipart/form-data",
    "image/png",
    "image/jpeg",
    "image/webp",
    "image/gif",
    "image/bmp",
    "image/tiff",
    "application/x-npy",
    "application/octet-stream",
)
_TYPE: Final = re.compile(r"[\w!#$&^.+-]{1,127}/[\w!#$&^.+-]{1,127}", re.ASCII)


@lru_cache(maxsize=256)
def media_type(content_type: str) -> str:
    """The type that a Content-Type header names, in small letters without its parameters; empty if it names none."""
    kind = content_type.partition(";")[0].strip(" \t")  # no other blanks: what HTTP does not strip, no reader may
    return kind.lower() if _TYPE.fullmatch(kind) else ""


def unsupported(content_type: str, accepted: Sequence[str]) -> PayloadError:
    """The error that a body of another media type is refused with."""
    detail = f"Content-Type {content_type[:60]!r} is not accepted here; send {', '.join(accepted)}"
    return PayloadError("unsupported_media_type", detail)
