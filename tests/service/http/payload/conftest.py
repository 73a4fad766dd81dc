import base64
import io
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from acclimate_service.http.payload import PayloadError, PayloadLimits, decode
from acclimate_store import InputSpec, Resize

Decode = Callable[..., NDArray]
Refusal = Callable[..., PayloadError]
LIMITS = PayloadLimits()


@pytest.fixture(scope="session")
def input_spec() -> Callable[..., InputSpec]:
    def build(channels: int = 3, height: int = 8, width: int = 6, resize: Resize | None = None) -> InputSpec:
        return InputSpec(
            channels=channels, height=height, width=width, mean=(0.5,) * channels, std=(0.5,) * channels, resize=resize
        )

    return build


@pytest.fixture(scope="session")
def grey(input_spec: Callable[..., InputSpec]) -> InputSpec:
    return input_spec(channels=1)


@pytest.fixture(scope="session")
def rgb(input_spec: Callable[..., InputSpec]) -> InputSpec:
    return input_spec(channels=3)


@pytest.fixture(scope="session")
def read() -> Decode:
    def call(
        body: bytes,
        content_type: str,
        spec: InputSpec,
        headers: Mapping[str, str] | None = None,
        limits: PayloadLimits = LIMITS,
    ) -> NDArray:
        return decode(body, content_type, headers or {}, spec, limits)

    return call


@pytest.fixture(scope="session")
def refusal(read: Decode) -> Refusal:
    """Decodes what must be refused and gives the error."""

    def call(
        body: bytes,
        content_type: str,
        spec: InputSpec,
        headers: Mapping[str, str] | None = None,
        limits: PayloadLimits = LIMITS,
    ) -> PayloadError:
        with pytest.raises(PayloadError) as caught:
            read(body, content_type, spec, headers, limits)
        return caught.value

    return call


@pytest.fixture(scope="session")
def file() -> Callable[..., bytes]:
    """An image as the bytes of a PNG or JPEG file; keyword arguments are Pillow's."""

    def encode(image: Image.Image | NDArray, kind: str = "PNG", **options: object) -> bytes:
        stream = io.BytesIO()
        picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
        picture.save(stream, kind, **options)
        return stream.getvalue()

    return encode


@pytest.fixture(scope="session")
def npy() -> Callable[..., bytes]:
    def encode(array: NDArray, version: tuple[int, int] = (1, 0)) -> bytes:
        stream = io.BytesIO()
        np.lib.format.write_array(stream, array, version=version)
        return stream.getvalue()

    return encode


@pytest.fixture(scope="session")
def npy_claim() -> Callable[..., bytes]:
    """A .npy header that says whatever it is told, before any bytes."""

    def encode(shape: str, content: bytes = b"", descr: str = "'|u1'") -> bytes:
        header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content

    return encode


@pytest.fixture(scope="session")
def form() -> Callable[..., tuple[bytes, str]]:
    """Body and content type of a multipart form with one file part per item."""

    def encode(files: Sequence[bytes], boundary: str = "line") -> tuple[bytes, str]:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="images"; filename="x.png"\r\n\r\n'.encode()
        body = b"".join(head + content + b"\r\n" for content in files) + f"--{boundary}--\r\n".encode()
        return body, f"multipart/form-data; boundary={boundary}"

    return encode


@pytest.fixture(scope="session")
def base64_json() -> Callable[[Sequence[bytes]], bytes]:
    def encode(files: Sequence[bytes]) -> bytes:
        strings = ",".join(f'"{base64.b64encode(content).decode()}"' for content in files)
        return f'{{"images": [{strings}]}}'.encode()

    return encode
