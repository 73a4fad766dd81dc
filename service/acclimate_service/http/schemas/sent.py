"""Documents that callers send."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from acclimate_service.http.schemas.common import Absent, Adaptation, AdapterName, Count, Document

File: TypeAlias = Annotated[str, Field(json_schema_extra={"format": "binary"})]
Base64: TypeAlias = Annotated[str, Field(json_schema_extra={"contentEncoding": "base64"})]
Rows: TypeAlias = Annotated[list[list[list[float]]], Field(min_length=1)]
Planes: TypeAlias = Annotated[list[list[list[list[float]]]], Field(min_length=1)]
Labels: TypeAlias = Annotated[list[int | str], Field(min_length=1, description="A class index or name per image.")]


class EncodedImages(Document):
    """Image files in base64."""

    images: Annotated[list[Base64], Field(min_length=1)]


class Images(Document):
    """Images as numbers: uint8 of 0..255 or floating ones of 0..1."""

    images: Rows | Planes
    layout: Absent[Literal["NHWC", "NCHW", "NHW"]] = None
    dtype: Absent[Literal["uint8", "float32"]] = None


class LabelledEncodedImages(EncodedImages):
    """Image files in base64 and their labels."""

    labels: Labels


class LabelledImages(Images):
    """Images as numbers and their labels."""

    labels: Labels


class ImageForm(Document):
    """Image files, in order; the parts may have other names."""

    images: Annotated[list[File], Field(min_length=1)]


class LabelledForm(ImageForm):
    """Image files and their labels."""

    labels: Annotated[str, Field(description='A JSON list, such as `["Ankle boot", 3]`.')]


class Wanted(Document):
    """How a client is to be served; what is left out stays as it is."""

    adapter: Absent[AdapterName] = None
    hyperparameters: Absent[dict[str, Any]] = None
    adaptation: Absent[Adaptation] = None


class Version(Document):
    """A version to go back to; the newest that is kept, if none is named."""

    version: Absent[Annotated[int, Field(ge=1, le=2**53 - 1)]] = None


class LabelledRow(Document):
    """What one row of an earlier answer was."""

    request_id: Annotated[str, Field(max_length=128)]
    row: Count
    label: int | str


class LabelledRows(Document):
    """What rows of earlier answers were."""

    rows: Annotated[list[LabelledRow], Field(min_length=1, max_length=10_000)]
