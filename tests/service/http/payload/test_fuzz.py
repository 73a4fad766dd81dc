import contextlib

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from acclimate_service.http.payload import MEDIA_TYPES, PayloadError, PayloadLimits, decode
from acclimate_store import InputSpec, Resize

LIMITS = PayloadLimits(max_images=4, max_pixels=10_000, max_total_pixels=20_000)
SPEC = InputSpec(channels=3, height=8, width=6, mean=(0.5,) * 3, std=(0.5,) * 3)
RESIZING = InputSpec(
    channels=1,
    height=8,
    width=8,
    mean=(0.5,),
    std=(0.5,),
    resize=Resize(size=8, interpolation="bilinear", antialias=True, crop=8),
)
CONTENT_TYPES = st.sampled_from([*MEDIA_TYPES, "multipart/form-data; boundary=line"]) | st.text(max_size=30)
EXTENTS = st.lists(st.integers(-2, 2**32), max_size=5).map(lambda shape: ",".join(map(str, shape)))
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "X-Tensor-Shape": st.text(max_size=20) | EXTENTS,
        "X-Tensor-Layout": st.sampled_from(["NHWC", "NCHW", "NHW", "junk", ""]),
        "X-Tensor-Dtype": st.sampled_from(["uint8", "float32", "object", ""]),
    },
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=20,
)
HEADER_CHARACTERS = "0123456789-,()[]{}'.:eLTrueNonOfas# \n\\"
FORM_TOKENS = [b"--line", b"--", b"\r\n", b"\r", b"\n", b":", b" ", b"filename=", b'"', b"\xff", b";"]
fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def survive(body, content_type, headers=None):
    """Whatever happens but a PayloadError is a failure of the test; what is accepted must keep the promises."""
    for spec in (SPEC, RESIZING):
        with contextlib.suppress(PayloadError):
            batch = decode(body, content_type, headers or {}, spec, LIMITS)
            assert batch.shape[1:] == spec.shape
            assert 1 <= len(batch) <= LIMITS.max_images
            assert batch.dtype in (np.uint8, np.float32)
            assert batch.flags.c_contiguous


@fuzz
@given(st.binary(max_size=400), CONTENT_TYPES, HEADERS)
def test_random_bytes_are_refused_politely(body, content_type, headers):
    survive(body, content_type, headers)


@fuzz
@given(JSON, st.dictionaries(st.sampled_from(["layout", "dtype"]), JSON))
def test_random_json_is_refused_politely(images, fields):
    survive(orjson.dumps({"images": images, **fields}), "application/json")


@fuzz
@given(st.text(HEADER_CHARACTERS, max_size=60), st.sampled_from(["'|u1'", "'<f4'", "'|O'", "1"]))
def test_random_npy_headers_are_refused_politely(npy_claim, shape, descr):
    survive(npy_claim(shape, bytes(144), descr), "application/x-npy")


@fuzz
@given(st.lists(st.integers(-3, 2**64), max_size=70), st.binary(max_size=8))
def test_random_npy_shapes_are_refused_politely(npy_claim, shape, content):
    survive(npy_claim(f"{tuple(shape)}", content), "application/x-npy")


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of corrupt metadata
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@fuzz
@given(edits=st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=4)), min_size=1, max_size=6))
def test_damaged_image_files_are_refused_politely(file, kind, edits):
    data = bytearray(file(np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8), kind))
    for position, content in edits:
        start = position % len(data)
        data[start : start + len(content)] = content
    survive(bytes(data), "image/png")


@fuzz
@given(st.lists(st.sampled_from(FORM_TOKENS)))
def test_random_forms_are_refused_politely(tokens):
    survive(b"--line\r\nContent-Disposition: form-data" + b"".join(tokens), "multipart/form-data; boundary=line")


@fuzz
@given(arrays.arrays(np.uint8, st.tuples(st.integers(1, 4), st.just(3), st.just(8), st.just(6))))
def test_every_encoding_of_an_array_gives_the_same_batch(file, npy, form, base64_json, batch):
    last = np.ascontiguousarray(batch.transpose(0, 2, 3, 1))
    files = [file(image) for image in last]
    shape = ",".join(map(str, last.shape))
    bodies = [
        (orjson.dumps({"images": batch.tolist(), "dtype": "uint8"}), "application/json", {}),
        (orjson.dumps({"images": last.tolist(), "dtype": "uint8"}), "application/json", {}),
        (base64_json(files), "application/json", {}),
        (npy(batch), "application/x-npy", {}),
        (npy(last), "application/x-npy", {}),
        (last.tobytes(), "application/octet-stream", {"X-Tensor-Shape": shape}),
        (*form(files), {}),
    ]
    for body, content_type, headers in bodies:
        np.testing.assert_array_equal(decode(body, content_type, headers, SPEC, LIMITS), batch)


@fuzz
@given(arrays.arrays(np.float32, (2, 3, 8, 6), elements=st.floats(0, 1, width=32)))
def test_every_encoding_of_floats_gives_the_same_batch(npy, batch):
    raw = {"X-Tensor-Shape": "2,3,8,6", "X-Tensor-Dtype": "float32"}
    bodies = [
        (orjson.dumps({"images": batch.tolist(), "dtype": "float32"}), "application/json", {}),
        (npy(batch), "application/x-npy", {}),
        (npy(batch.astype(np.float64)), "application/x-npy", {}),
        (batch.tobytes(), "application/octet-stream", raw),
    ]
    for body, content_type, headers in bodies:
        np.testing.assert_array_equal(decode(body, content_type, headers, SPEC, LIMITS), batch)
