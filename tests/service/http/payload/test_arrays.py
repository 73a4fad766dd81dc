import pickle

import numpy as np
import pytest

from acclimate_service.http.payload import PayloadLimits

NPY = "application/x-npy"
RAW = "application/octet-stream"


@pytest.fixture(scope="module")
def batch():
    """uint8 [5, 3, 8, 6]."""
    return np.random.default_rng(0).integers(0, 256, (5, 3, 8, 6), dtype=np.uint8)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_npy_version_is_read(read, npy, rgb, batch, version):
    np.testing.assert_array_equal(read(npy(batch, version), NPY, rgb), batch)


def test_both_layouts_give_the_same_batch(read, npy, rgb, batch):
    last = read(npy(np.ascontiguousarray(batch.transpose(0, 2, 3, 1))), NPY, rgb)
    np.testing.assert_array_equal(last, batch)
    assert last.flags.c_contiguous


def test_fortran_order_is_understood(read, npy, rgb, batch):
    np.testing.assert_array_equal(read(npy(np.asfortranarray(batch)), NPY, rgb), batch)


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f2", ">f4", ">f8"])
def test_floats_of_any_width_and_byte_order_become_float32(read, npy, rgb, batch, dtype):
    values = (batch / 255).astype(dtype)
    result = read(npy(values), NPY, rgb)
    assert result.dtype == np.dtype("float32")
    np.testing.assert_array_equal(result, values.astype(np.float32))


def test_uint8_as_the_model_takes_it_is_a_view_of_the_body_and_not_copied(read, rgb, batch):
    body = batch.tobytes()
    result = read(body, RAW, rgb, {"X-Tensor-Shape": "5,3,8,6"})
    assert result.dtype == np.uint8
    assert result.flags.c_contiguous
    assert np.shares_memory(result, np.frombuffer(body, np.uint8))
    assert not result.flags.writeable


def test_channels_that_come_last_are_brought_to_the_front(read, rgb, batch):
    result = read(batch.transpose(0, 2, 3, 1).tobytes(), RAW, rgb, {"X-Tensor-Shape": "5,8,6,3"})
    np.testing.assert_array_equal(result, batch)
    assert result.flags.c_contiguous


def test_images_without_channel_axis_suit_a_grey_model(read, npy, grey, batch):
    np.testing.assert_array_equal(read(npy(batch[:, 0]), NPY, grey), batch[:, :1])


def test_images_without_channel_axis_are_refused_by_a_colour_model(refusal, npy, rgb, batch):
    error = refusal(npy(batch[:, 0]), NPY, rgb, {"X-Tensor-Layout": "NHW"})
    assert error.code == "wrong_shape"
    assert "NHWC [B, 8, 6, 3]" in error.detail


def test_a_raw_float_tensor_is_little_endian(read, rgb, batch):
    values = (batch / 255).astype("<f4")
    headers = {"x-tensor-shape": "5, 3, 8, 6", "x-tensor-dtype": "float32", "x-tensor-layout": "NCHW"}
    np.testing.assert_array_equal(read(values.tobytes(), RAW, rgb, headers), values)


def test_a_cube_is_ambiguous_until_its_layout_is_stated(read, refusal, npy, input_spec):
    cube = np.random.default_rng(1).integers(0, 256, (2, 3, 3, 3), dtype=np.uint8)
    spec = input_spec(channels=3, height=3, width=3)
    error = refusal(npy(cube), NPY, spec)
    assert error.code == "ambiguous_layout"
    assert "NHWC and NCHW" in error.detail
    np.testing.assert_array_equal(read(npy(cube), NPY, spec, {"X-Tensor-Layout": "NCHW"}), cube)
    last = read(npy(cube), NPY, spec, {"X-Tensor-Layout": "NHWC"})
    np.testing.assert_array_equal(last, cube.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("shape", [(5, 3, 6, 8), (5, 4, 8, 6), (5, 8, 6), (48,), (), (1, 5, 3, 8, 6), (5, 3, 0, 6)])
def test_a_wrong_shape_is_told_with_the_shapes_that_fit(refusal, npy, rgb, shape):
    error = refusal(npy(np.zeros(shape, np.uint8)), NPY, rgb)
    assert error.code == "wrong_shape"
    assert str(list(shape)) in error.detail
    assert "NHWC [B, 8, 6, 3] or NCHW [B, 3, 8, 6]" in error.detail


def test_a_stated_layout_is_held_to(refusal, npy, rgb, batch):
    error = refusal(npy(batch), NPY, rgb, {"X-Tensor-Layout": "NHWC"})
    assert error.code == "wrong_shape"
    assert "with layout NHWC" in error.detail


def test_an_unknown_layout_lists_the_known_ones(refusal, npy, rgb, batch):
    error = refusal(npy(batch), NPY, rgb, {"X-Tensor-Layout": "CHWN"})
    assert error.code == "invalid_request"
    assert "NHWC, NCHW, NHW" in error.detail


def test_an_empty_batch_is_refused(refusal, npy, rgb):
    assert refusal(npy(np.zeros((0, 3, 8, 6), np.uint8)), NPY, rgb).code == "empty_batch"
    assert refusal(b"", RAW, rgb, {"X-Tensor-Shape": "0,3,8,6"}).code == "empty_batch"


def test_too_many_images_are_refused(refusal, npy, rgb, batch):
    error = refusal(npy(batch), NPY, rgb, limits=PayloadLimits(max_images=4))
    assert error.code == "too_many_images"
    assert "5 images; send at most 4" in error.detail


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16", "bool", "complex64", "<U3", "M8[s]"])
def test_other_types_are_refused_by_name(refusal, npy, rgb, dtype):
    error = refusal(npy(np.zeros((1, 3, 8, 6), dtype)), NPY, rgb)
    assert error.code == "wrong_dtype"
    assert "uint8 (0..255) or float32 (0..1)" in error.detail


class Bomb:
    fuse: list[str] = []  # noqa: RUF012

    def __reduce__(self):
        return self.fuse.append, ("exploded",)


def test_a_pickle_inside_npy_is_refused_unread(refusal, npy_claim, rgb):
    body = npy_claim("(1, 3, 8, 6)", pickle.dumps(Bomb()), descr="'|O'")
    error = refusal(body, NPY, rgb)
    assert error.code == "wrong_dtype"
    assert "pickled" in error.detail
    assert Bomb.fuse == []


def test_structured_types_are_refused(refusal, npy_claim, rgb):
    assert refusal(npy_claim("(1, 3, 8, 6)", bytes(144), descr="[('r', '|u1')]"), NPY, rgb).code == "wrong_dtype"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_told_with_its_index(refusal, npy, rgb, value):
    values = np.zeros((2, 3, 8, 6), np.float32)
    values[1, 2, 7, 0] = value
    error = refusal(npy(values), NPY, rgb)
    assert error.code == "non_finite"
    assert "[1, 2, 7, 0]" in error.detail


@pytest.mark.parametrize("value", [255.0, 1.002, -0.002, 1e30])
def test_floats_outside_0_to_1_are_refused_with_the_extreme_found(refusal, npy, rgb, value):
    values = np.zeros((1, 3, 8, 6), np.float64)
    values[0, 0, 0, 0] = value
    error = refusal(npy(values), NPY, rgb)
    assert error.code == "out_of_range"
    assert f"{value:g}" in error.detail
    assert "0..1" in error.detail


def test_floats_within_the_tolerance_are_kept_as_they_are(read, npy, rgb):
    values = np.full((1, 3, 8, 6), 1.0005, np.float32)
    values[0, 0] = -0.0005
    np.testing.assert_array_equal(read(npy(values), NPY, rgb), values)


@pytest.mark.parametrize(
    "body",
    [b"", b"\x93NUMPY", b"not a numpy file at all", b"\x93NUMPY\x09\x00\x10\x00" + b" " * 16],
    ids=["empty", "magic only", "text", "version 9"],
)
def test_what_is_not_npy_is_malformed(refusal, rgb, body):
    assert refusal(body, NPY, rgb).code == "malformed_body"


@pytest.mark.parametrize("shape", ["(" * 400, "-" * 900 + "1", "(1,", "'''", "{}", "(1.5, 3, 8, 6)", "('a',)", "3"])
def test_a_junk_npy_header_is_malformed(refusal, npy_claim, rgb, shape):
    assert refusal(npy_claim(shape), NPY, rgb).code == "malformed_body"


@pytest.mark.parametrize("shape", ["(1, 3, 8, 7)", "(2305843009213693952, 3, 8, 6)", "(-1, -3, 8, 6)", "(1, 3, 8, 5)"])
def test_an_npy_header_that_lies_about_the_size_is_malformed(refusal, npy_claim, rgb, shape):
    assert refusal(npy_claim(shape, bytes(144)), NPY, rgb).code == "malformed_body"


@pytest.mark.parametrize("shape", ["(1, 9223372036854775808, 9223372036854775808, 0)", f"({'1, ' * 100})"])
def test_an_npy_shape_that_numpy_cannot_hold_is_a_wrong_shape(refusal, npy_claim, rgb, shape):
    content = b"" if "0)" in shape else b"x"
    assert refusal(npy_claim(shape, content), NPY, rgb).code == "wrong_shape"


@pytest.mark.parametrize(
    "shape",
    [
        *("", "-1,3,8,6", "1,3,8", "1;3;8;6", "a,b,c,d", "1.0,3,8,6", "1,3,8,6,", "+1,3,8,6", "1e2,3,8,6"),
        *("4294967296,4294967296,4294967296,4294967296", "9" * 5000 + ",3,8,6", "1,1,3,8,6", "२,3,8,6"),
    ],
)
def test_a_junk_shape_header_is_refused(refusal, rgb, shape):
    error = refusal(bytes(144), RAW, rgb, {"X-Tensor-Shape": shape})
    assert error.code in {"invalid_request", "wrong_shape"}
    assert "X-Tensor-Shape" in error.detail
    assert len(error.detail) < 300


@pytest.mark.parametrize("shape", ["2147483648,3,8,6", "2,3,8,6", "1,3,8,5", "0,3,8,6"])
def test_a_shape_header_must_match_the_body(refusal, rgb, shape):
    error = refusal(bytes(144), RAW, rgb, {"X-Tensor-Shape": shape})
    assert error.code == "wrong_shape"
    assert "the body has 144" in error.detail


def test_a_shape_header_with_a_zero_never_overflows(refusal, rgb):
    error = refusal(b"", RAW, rgb, {"X-Tensor-Shape": "1,9999999999,9999999999,0"})
    assert error.code == "wrong_shape"


def test_a_raw_tensor_needs_its_shape(refusal, rgb):
    error = refusal(bytes(144), RAW, rgb)
    assert error.code == "invalid_request"
    assert "X-Tensor-Shape" in error.detail


def test_a_raw_tensor_of_another_type_is_refused(refusal, rgb):
    error = refusal(bytes(144), RAW, rgb, {"X-Tensor-Shape": "1,3,8,6", "X-Tensor-Dtype": "float64"})
    assert error.code == "wrong_dtype"
    assert "uint8 or float32" in error.detail


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/xml; charset=utf-8", "image/avif", "💥;a=b"])
def test_another_media_type_is_refused_with_the_list_of_accepted_ones(refusal, rgb, content_type):
    error = refusal(b"x", content_type, rgb)
    assert error.code == "unsupported_media_type"
    assert "application/json, multipart/form-data, image/png" in error.detail


def test_the_media_type_is_read_without_case_and_parameters(read, npy, rgb, batch):
    np.testing.assert_array_equal(read(npy(batch), "Application/X-NPY ; version=1", rgb), batch)
