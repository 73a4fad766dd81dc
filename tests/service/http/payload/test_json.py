import json

import numpy as np
import pytest

from acclimate_service.http.payload import PayloadLimits

JSON = "application/json"


@pytest.fixture(scope="module")
def image():
    """A grey image of the model's size, as nested lists."""
    return np.random.default_rng(0).integers(2, 256, (8, 6)).tolist()


@pytest.fixture
def refused(refusal, grey):
    """Refuses a document (or raw text) and gives the error."""

    def call(document, **limits):
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return refusal(body, JSON, grey, limits=PayloadLimits(**limits))

    return call


@pytest.fixture
def accepted(read, grey):
    return lambda document: read(json.dumps(document).encode(), JSON, grey)


def test_integers_are_uint8(accepted, image):
    result = accepted({"images": [image, image]})
    assert result.dtype == np.uint8
    np.testing.assert_array_equal(result, np.array([[image], [image]]))


def test_one_fraction_makes_all_numbers_floats(accepted):
    pixels = [[1] * 6] * 7 + [[0.5] * 6]
    result = accepted({"images": [pixels]})
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result[0, 0], np.array(pixels, np.float32))


def test_the_layout_may_be_stated(accepted, image):
    channels_last = np.array(image)[..., None].tolist()
    result = accepted({"images": [channels_last], "layout": "NHWC"})
    np.testing.assert_array_equal(result[0, 0], image)


def test_zeros_are_the_same_in_both_types(accepted):
    assert accepted({"images": [[[0] * 6] * 8]}).dtype == np.uint8


def test_zeros_and_ones_need_a_stated_type(accepted, refused):
    pixels = [[0, 1] * 3] * 8
    error = refused({"images": [pixels]})
    assert error.code == "ambiguous_dtype"
    assert '"uint8" or "float32"' in error.detail
    assert accepted({"images": [pixels], "dtype": "uint8"}).dtype == np.uint8
    as_float = accepted({"images": [pixels], "dtype": "float32"})
    assert as_float.dtype == np.float32
    np.testing.assert_array_equal(as_float[0, 0], np.array(pixels))


def test_stated_uint8_refuses_fractions(refused):
    error = refused({"images": [[[0.25] * 6] * 8], "dtype": "uint8"})
    assert error.code == "wrong_dtype"
    assert "0.25" in error.detail


def test_stated_floats_are_held_to_0_to_1(refused, image):
    assert refused({"images": [image], "dtype": "float32"}).code == "out_of_range"


@pytest.mark.parametrize("value", [256, -1, 9_223_372_036_854_775_807])
def test_integers_outside_0_to_255_are_refused(refused, value):
    error = refused({"images": [[[value] * 6] * 8]})
    assert error.code == "out_of_range"
    assert str(value) in error.detail


def test_floats_of_0_to_255_are_refused_with_advice(refused):
    error = refused({"images": [[[254.5] * 6] * 8]})
    assert error.code == "out_of_range"
    assert "254.5" in error.detail
    assert "divide by 255" in error.detail


@pytest.mark.parametrize("value", [True, None, {"a": 1}])
def test_what_is_not_a_number_is_refused(refused, value):
    error = refused({"images": [[[value] * 6] * 8]})
    assert error.code == "wrong_dtype"
    assert type(value).__name__ in error.detail


def test_a_boolean_among_numbers_is_not_taken_for_1(refused):
    assert refused({"images": [[[7] * 6] * 7 + [[7, 7, 7, 7, 7, True]]]}).code == "wrong_dtype"


@pytest.mark.parametrize(
    "images",
    [[[[1, 2], [3]]], [[[1, 2], 3]], [[1], [[1]]], [[[2] * 6] * 8, [[2] * 6] * 7], [[], [1]]],
)
def test_ragged_lists_are_refused(refused, images):
    error = refused({"images": images})
    assert error.code == "wrong_shape"
    assert "ragged" in error.detail


def test_an_image_of_another_size_is_refused(refused):
    error = refused({"images": [[[5] * 7] * 8]})
    assert error.code == "wrong_shape"
    assert "[1, 8, 7]" in error.detail


@pytest.mark.parametrize("images", [[[]], [[[]]], [[[], []], [[], []]], [3, 4]])
def test_images_without_pixels_are_a_wrong_shape(refused, images):
    assert refused({"images": images}).code == "wrong_shape"


def test_an_empty_batch_is_refused(refused):
    assert refused({"images": []}).code == "empty_batch"


def test_too_many_images_are_refused(refused, image):
    assert refused({"images": [image] * 3}, max_images=2).code == "too_many_images"
    assert refused({"images": ["junk"] * 3}, max_images=2).code == "too_many_images"


@pytest.mark.parametrize("depth", [5, 100, 900])
def test_nesting_deeper_than_a_batch_is_a_wrong_shape(refused, depth):
    error = refused(b'{"images":' + b"[" * depth + b"7" + b"]" * depth + b"}")
    assert error.code == "wrong_shape"
    assert len(error.detail) < 300


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"images": [[[NaN]]]}', b'{"images": [[[1e999]]]}', b"\xff\xfe", b'{"images":' + b"[" * 100_000],
    ids=["empty", "cut", "NaN", "overflow", "not UTF-8", "100000 deep"],
)
def test_malformed_json_is_refused(refused, body):
    error = refused(body)
    assert error.code == "malformed_body"
    assert "JSON" in error.detail


@pytest.mark.parametrize("document", [[], 3, None, "images", {}, {"images": 3}, {"images": {"a": 1}}, {"image": []}])
def test_a_document_without_a_list_of_images_is_refused(refused, document):
    error = refused(document)
    assert error.code == "invalid_request"
    assert '{"images": [...]}' in error.detail


def test_a_misspelt_field_is_refused_by_name(refused, image):
    error = refused({"images": [image], "layuot": "NHWC"})
    assert error.code == "invalid_request"
    assert "'layuot'" in error.detail
    assert "images, layout, dtype" in error.detail


@pytest.mark.parametrize("value", ["int32", None, 3, ["uint8"]])
def test_another_dtype_is_refused(refused, image, value):
    assert refused({"images": [image], "dtype": value}).code == "wrong_dtype"


@pytest.mark.parametrize("value", ["CHWN", None, {"a": 1}])
def test_another_layout_is_refused(refused, image, value):
    assert refused({"images": [image], "layout": value}).code == "invalid_request"


def test_base64_images_are_decoded_in_order(read, file, base64_json, grey):
    images = np.random.default_rng(3).integers(0, 256, (3, 8, 6), dtype=np.uint8)
    body = base64_json([file(image) for image in images])
    np.testing.assert_array_equal(read(body, JSON, grey), images[:, None])


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("data:image/png;base64,iVBORw0KGgo=", "data URL"),
        ("iVBORw0KGgo", "base64"),
        ("iVBO\nRw0K", "base64"),
        ("ünï", "base64"),
        ("", "empty"),
        ("bm90IGFuIGltYWdl", "is no PNG, JPEG"),
    ],
)
def test_a_bad_base64_image_is_refused_with_its_index(refused, text, hint):
    error = refused({"images": [text]})
    assert error.code == "undecodable_image"
    assert "image 0" in error.detail
    assert hint in error.detail


def test_base64_and_numbers_do_not_mix(refused, image):
    assert refused({"images": ["iVBORw0KGgo=", image]}).code == "invalid_request"


def test_base64_images_take_no_layout(refused):
    assert refused({"images": ["iVBORw0KGgo="], "layout": "NHWC"}).code == "invalid_request"
