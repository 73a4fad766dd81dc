"""The one exception of this package."""

from typing import Literal

PayloadCode = Literal[
    "ambiguous_dtype",
    "ambiguous_layout",
    "empty_batch",
    "invalid_labels",
    "invalid_request",
    "malformed_body",
    "non_finite",
    "out_of_range",
    "too_many_images",
    "too_many_pixels",
    "undecodable_image",
    "unsupported_media_type",
    "wrong_dtype",
    "wrong_shape",
]


class PayloadError(Exception):
    """A request body that is refused: a stable code for programs, a detail for people.

    The detail says what was found and what is accepted. Which HTTP status a code becomes is not decided here.
    """

    def __init__(self, code: PayloadCode, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"
