"""How much one request may ask for, whatever its encoding, and the one exception of this package."""

from dataclasses import dataclass
from typing import Final, Literal

PayloadCode = Literal[
    "ambiguous_dtype",
    "ambiguous_layout",
    "body_too_large",
    "empty_batch",
    "invalid_labels",
    "invalid_request",
    "malformed_body",
    "non_finite",
    "out_of_range",
    "too_many_images",
    "too_many_pixels",
    "undecodable_image",
    "unsupported",
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


_LABEL_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class PayloadLimits:
    """Bounds on what a small body may expand to.

    Pixels are width x height of an encoded image, as its header declares them or after resizing, whichever is more.
    They are counted before anything is decoded. Arrays need no such bound: they cannot expand.

    Args:
        max_images: images per batch, in every encoding.
        max_pixels: per encoded image; the default is 4096 x 4096.
        max_total_pixels: over all encoded images of one request; the default is sixteen of the largest, or twenty
            photographs of 12 megapixels.
    """

    max_images: int = 256
    max_pixels: int = 16_777_216
    max_total_pixels: int = 268_435_456

    def check_count(self, images: int) -> None:
        """Refuse an empty or an oversized batch.

        Raises:
            PayloadError: `empty_batch`, `too_many_images`.
        """
        if images < 1:
            raise PayloadError("empty_batch", f"the batch has no images; send 1 to {self.max_images}")
        if images > self.max_images:
            raise PayloadError("too_many_images", f"the batch has {images} images; send at most {self.max_images}")

    def check_labels(self, nbytes: int) -> None:
        """Refuse labels that take more bytes than those of a full batch would.

        Raises:
            PayloadError: `invalid_labels`.
        """
        if nbytes > _LABEL_BYTES * self.max_images:
            detail = f"the labels take more than {_LABEL_BYTES * self.max_images} bytes; send one for each image"
            raise PayloadError("invalid_labels", detail)

    def check_pixels(self, pixels: list[int]) -> None:
        """Refuse encoded images, given the pixels of each, that are too large alone or together.

        Raises:
            PayloadError: `too_many_pixels`.
        """
        for index, count in enumerate(pixels):
            if count > self.max_pixels:
                raise PayloadError(
                    "too_many_pixels",
                    f"image {index} has {count} pixels (counted after resizing where that is more); "
                    f"at most {self.max_pixels} are accepted per image",
                )
        if sum(pixels) > self.max_total_pixels:
            raise PayloadError(
                "too_many_pixels",
                f"the images have {sum(pixels)} pixels together; at most {self.max_total_pixels} are accepted per "
                "request: send fewer or smaller images",
            )
