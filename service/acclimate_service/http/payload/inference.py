"""Requests of the Open Inference Protocol: JSON that holds its tensor, or is followed by it as bytes."""

import math
import struct
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from acclimate_store import InputSpec

from .arrays import LAYOUTS, Batch, Claim, canonical
from .documents import Json, flatten, from_base64, load_json, to_array
from .images import decode_images
from .limits import PayloadError, PayloadLimits

INPUT: Final = "images"
OUTPUTS: Final = ("logits", "probabilities", "labels", "signals")
_DTYPES: Final[Mapping[str, tuple[str, np.dtype[Any]]]] = {
    "UINT8": ("uint8", np.dtype("u1")),
    "FP32": ("float32", np.dtype("<f4")),
}
_DATATYPES: Final = (*_DTYPES, "BYTES")
_LARGEST: Final = 2**31 - 1
_LENGTH: Final = struct.Struct("<I")
_ELSEWHERE: Final = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")
_LACKING: Final[Mapping[str, str]] = {
    **dict.fromkeys(_ELSEWHERE, "tensors come and go in the body, not in shared memory"),
    **dict.fromkeys(
        ("sequence_id", "sequence_start", "sequence_end"),
        "there are no sequences: a client, named by the parameter client_id, has its state until it is reset",
    ),
    "priority": "all callers have equal shares of the device",
    "classification": "the outputs labels and probabilities say the same",
}
"""Parameters of the protocol's extensions, and why there is nothing that they could mean here."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input whose values were not looked at yet.

    Args:
        shape: as it is stated.
        datatype: one of UINT8, FP32, BYTES.
        layout: of numbers, if it is stated.
        data: bytes as they lie in the body, or JSON.
    """

    shape: tuple[int, ...]
    datatype: str
    layout: str | None
    data: memoryview | list[Any]


@dataclass(frozen=True, slots=True)
class Inference:
    """What a request asks for.

    Args:
        id: of the request; empty if it has none.
        parameters: of the request, by name; each has been checked for its type.
        images: its one input.
        outputs: those wanted, in order, and whether each is wanted as bytes.
    """

    id: str
    parameters: Mapping[str, Any]
    images: Tensor
    outputs: Mapping[str, bool]


def read_inference(body: bytes, json_bytes: int | None) -> Inference:
    """Read a request, all but the values of its tensor.

    Args:
        body: the whole body.
        json_bytes: how much of it is JSON; None if all is. The tensor follows at once.

    Raises:
        PayloadError: `malformed_body`, `body_too_large`, `invalid_request`, `wrong_dtype`, `wrong_shape`, and
            `unsupported` for what belongs to an extension of the protocol that is not spoken here.
    """
    if json_bytes is not None and not 0 < json_bytes <= len(body):
        detail = f"Inference-Header-Content-Length is {json_bytes}, but 1 to {len(body)} bytes of this body can be JSON"
        raise PayloadError("malformed_body", detail)
    document = _members(load_json(body[:json_bytes]), "the request", ("id", "parameters", "inputs", "outputs"))
    identity = document.get("id", "")
    if not isinstance(identity, str):
        raise PayloadError("invalid_request", "the id of a request is a string")
    accepted = {"client_id": str, "adapt": bool, "timeout": int, "binary_data_output": bool}
    parameters = _parameters(document, "the request", accepted)
    as_bytes = parameters.get("binary_data_output", False)
    images = _input(document.get("inputs"), memoryview(body)[len(body) if json_bytes is None else json_bytes :])
    return Inference(identity, parameters, images, _outputs(document.get("outputs"), as_bytes=as_bytes))


def decoding_tensor(tensor: Tensor, spec: InputSpec, limits: PayloadLimits) -> Generator[None, None, Batch]:
    """Decode the images of a request, a picture at each step, as `payload.decoding` does.

    Raises:
        PayloadError: `wrong_shape` where the values are not as many as the shape says, and what `decoding` raises.
    """
    if tensor.datatype == "BYTES":
        limits.check_count(tensor.shape[0])
        return (yield from decode_images(_files(tensor), spec, limits))
    name, dtype = _DTYPES[tensor.datatype]
    size, data = math.prod(tensor.shape), tensor.data
    if isinstance(data, memoryview):
        found, elements = len(data) // dtype.itemsize, None
        if len(data) == size * dtype.itemsize:  # unlike np.frombuffer, this accepts an empty buffer
            elements = np.require(
                np.ndarray(size, dtype, buffer=data), requirements="A"
            )  # JSON before it has any length
    else:
        numbers = flatten(data)[1]
        found, elements = len(numbers), to_array(numbers, name) if len(numbers) == size else None
    if elements is None:
        detail = f"{INPUT} has shape {str(list(tensor.shape))[:80]}, which is {size} values, and {found} are there"
        raise PayloadError("wrong_shape", detail)
    return canonical(Claim(elements, tensor.shape, tensor.layout), spec, limits)


def _members(value: Json, what: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PayloadError("invalid_request", f"{what} must be a JSON object")
    for name in value:
        if name not in known:
            detail = f"{what} has the member {name[:40]!r}; accepted are {', '.join(known)}"
            raise PayloadError("invalid_request", detail)
    return value


def _parameters(document: dict[str, Any], what: str, accepted: Mapping[str, type]) -> dict[str, Any]:
    """The parameters of a request, an input or an output."""
    found = document.get("parameters", {})
    if not isinstance(found, dict):
        raise PayloadError("invalid_request", f"the parameters of {what} must be a JSON object")
    for name, value in found.items():
        if name in _LACKING:
            raise PayloadError("unsupported", f"{name} is not supported: {_LACKING[name]}")
        if name not in accepted:
            known = ", ".join(accepted)
            raise PayloadError("invalid_request", f"{what} has no parameter {name[:40]!r}; accepted are {known}")
        if type(value) is not accepted[name]:
            kind = {str: "a string", bool: "true or false", int: "a whole number"}[accepted[name]]
            raise PayloadError("invalid_request", f"the parameter {name} of {what} is {kind}")
    return found


def _input(inputs: Json, binary: memoryview) -> Tensor:
    if not isinstance(inputs, list) or len(inputs) != 1:
        raise PayloadError("invalid_request", f"a request has one input, a tensor with the name {INPUT!r}")
    found = _members(inputs[0], "the input", ("name", "shape", "datatype", "parameters", "data"))
    if found.get("name") != INPUT:
        raise PayloadError("invalid_request", f"the input is {str(found.get('name'))[:40]!r}; its name is {INPUT!r}")
    datatype, shape = found.get("datatype"), found.get("shape")
    if datatype not in _DATATYPES:
        detail = f"the datatype {str(datatype)[:20]!r} is not accepted; send {' or '.join(_DATATYPES)}"
        raise PayloadError("wrong_dtype", detail)
    if not (isinstance(shape, list) and shape and all(type(each) is int and 0 <= each <= _LARGEST for each in shape)):
        raise PayloadError(
            "invalid_request", f"the shape of {INPUT} is a list of whole numbers, such as [20, 1, 28, 28]"
        )
    if datatype == "BYTES" and (len(shape) > 2 or shape[1:] not in ([], [1])):
        detail = f"{INPUT} of BYTES is one image file for each image, of shape [B] or [B, 1], not {str(shape)[:80]}"
        raise PayloadError("wrong_shape", detail)
    parameters = _parameters(found, f"the input {INPUT}", {"binary_data_size": int, "layout": str})
    layout = parameters.get("layout")
    if layout is not None and (layout not in LAYOUTS or datatype == "BYTES"):
        raise PayloadError("invalid_request", f"layout is one of {', '.join(LAYOUTS)}, of numbers and not of files")
    size = parameters.get("binary_data_size")
    if (size is None) == ("data" not in found):
        raise PayloadError("invalid_request", f"{INPUT} has either data, or the parameter binary_data_size")
    if len(binary) != (size or 0):
        detail = f"{len(binary)} bytes follow the JSON, and {INPUT} has binary_data_size {size or 0}"
        raise PayloadError("malformed_body", detail)
    data = binary if size is not None else found["data"]
    if not isinstance(data, list | memoryview):
        raise PayloadError("invalid_request", f"the data of {INPUT} is a list")
    return Tensor(tuple(shape), datatype, layout, data)


def _outputs(outputs: Json, *, as_bytes: bool) -> dict[str, bool]:
    """The outputs that are wanted, all if none is named, and whether as bytes."""
    if outputs is None or outputs == []:
        return dict.fromkeys(OUTPUTS, as_bytes)
    if not isinstance(outputs, list):
        raise PayloadError("invalid_request", "outputs is a list")
    wanted = dict[str, bool]()
    for output in outputs:
        found = _members(output, "an output", ("name", "parameters"))
        name = found.get("name")
        if name not in OUTPUTS or name in wanted:
            detail = (
                f"there is no output {str(name)[:40]!r}, or it is there twice; the outputs are {', '.join(OUTPUTS)}"
            )
            raise PayloadError("invalid_request", detail)
        parameters = _parameters(found, f"the output {name}", {"binary_data": bool})
        wanted[name] = parameters.get("binary_data", as_bytes)
    return wanted


def _files(tensor: Tensor) -> list[bytes]:
    count, data = tensor.shape[0], tensor.data
    if isinstance(data, memoryview):
        return _split(data, count)
    texts = flatten(data)[1]
    if set(map(type, texts)) != {str}:
        raise PayloadError("wrong_dtype", f"the data of {INPUT} is BYTES: send strings, an image file in base64 each")
    if len(texts) != count:
        raise PayloadError("wrong_shape", f"{INPUT} has shape {[count]}, and {len(texts)} image files are there")
    return [from_base64(text, index) for index, text in enumerate(texts)]


def _split(data: memoryview, count: int) -> list[bytes]:
    """The files of a binary tensor of BYTES, each after its length in four bytes, the least one first."""
    files, at = list[bytes](), 0
    while at < len(data) and len(files) < count:
        start = at + _LENGTH.size
        length = _LENGTH.unpack(data[at:start])[0] if start <= len(data) else _LARGEST
        at = start + length
        if at > len(data):
            raise PayloadError("malformed_body", f"image {len(files)} of {INPUT} is cut short")
        files.append(bytes(data[start:at]))
    if at != len(data) or len(files) != count:
        detail = f"{INPUT} has shape {[count]}; {len(files)} image files take {at} of its {len(data)} bytes"
        raise PayloadError("wrong_shape", detail)
    return files
