"""Batches to bodies: arrays raw, files as they are, Pillow images as PNG, junk refused with a helpful message."""

import email
import email.policy
import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image, ImageOps

from acclimate_client._images import encode

GRAY = np.arange(12, dtype=np.uint8).reshape(3, 4)


def file_bytes(kind, pixels=GRAY):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=kind)
    return buffer.getvalue()


def tensor(body):
    shape = [int(size) for size in body.headers["X-Tensor-Shape"].split(",")]
    dtype = np.dtype(body.headers["X-Tensor-Dtype"]).newbyteorder("<")
    return np.frombuffer(body.content, dtype).reshape(shape)


def parts(body):
    """The files of a multipart body, read by the standard library's parser."""
    head = f"Content-Type: {body.headers['Content-Type']}\r\n\r\n".encode()
    message = email.message_from_bytes(head + body.content, policy=email.policy.HTTP)
    assert not message.defects
    return [(part.get_content_type(), part.get_payload(decode=True)) for part in message.iter_parts()]


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=3, max_dims=4, max_side=5)))
def test_any_uint8_batch_arrives_as_it_is(batch):
    np.testing.assert_array_equal(tensor(encode(batch)), batch)


@given(
    hnp.arrays(
        st.sampled_from(["<f2", "<f4", ">f4", "<f8", ">f8"]),
        hnp.array_shapes(min_dims=3, max_dims=4, max_side=3),
        elements=st.floats(0, 1, width=16),
    )
)
def test_any_floating_batch_arrives_as_float32(batch):
    body = encode(batch)
    assert body.headers["X-Tensor-Dtype"] == "float32"
    np.testing.assert_array_equal(tensor(body), batch.astype(np.float32))


def test_strided_and_reversed_arrays_are_sent_in_their_logical_order():
    batch = np.arange(48, dtype=np.uint8).reshape(2, 4, 6)[:, ::-1, ::2].transpose(0, 2, 1)
    np.testing.assert_array_equal(tensor(encode(batch)), batch)


def test_a_list_of_arrays_is_one_batch():
    np.testing.assert_array_equal(tensor(encode([GRAY, GRAY + 1])), np.stack([GRAY, GRAY + 1]))


def test_torch_tensors_count_as_arrays():
    batch = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    np.testing.assert_array_equal(tensor(encode(batch)), batch.numpy())
    np.testing.assert_array_equal(tensor(encode(list(batch))), batch.numpy())


def test_a_tensor_that_numpy_cannot_read_is_refused_with_the_reason():
    with pytest.raises(TypeError, match=r"Tensor cannot be read as a NumPy array.*requires grad"):
        encode(torch.zeros(2, 3, 4, requires_grad=True))


def test_layout_is_stated_where_it_is_known():
    assert encode(np.zeros((1, 3, 4), np.uint8)).headers["X-Tensor-Layout"] == "NHW"
    assert encode(np.zeros((1, 3, 3, 3), np.uint8), "NCHW").headers["X-Tensor-Layout"] == "NCHW"
    assert "X-Tensor-Layout" not in encode(np.zeros((1, 3, 3, 3), np.uint8)).headers


def test_files_are_sent_as_they_are_and_in_order(tmp_path):
    png, jpeg = file_bytes("PNG"), file_bytes("JPEG")
    (tmp_path / "a.png").write_bytes(png)
    (tmp_path / "b.jpg").write_bytes(jpeg)
    body = encode([tmp_path / "b.jpg", str(tmp_path / "a.png"), jpeg])
    assert parts(body) == [("image/jpeg", jpeg), ("image/png", png), ("image/jpeg", jpeg)]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_pillow_images_arrive_pixel_for_pixel(mode):
    image = Image.fromarray(GRAY).convert("RGB").convert(mode) if mode != "I;16" else Image.new(mode, (4, 3), 40_000)
    ((kind, content),) = parts(encode([image]))
    arrived = Image.open(io.BytesIO(content))
    assert kind == "image/png"
    assert arrived.convert(mode).tobytes() == image.tobytes()


def test_pillow_images_and_files_may_be_mixed():
    assert len(parts(encode([Image.fromarray(GRAY), file_bytes("JPEG")]))) == 2


def test_equal_batches_give_equal_bytes_so_a_key_can_be_sent_again():
    files = [file_bytes("PNG"), file_bytes("JPEG")]
    assert encode(files) == encode(list(files))
    assert encode(files) != encode(files[::-1])


def test_inputs_are_left_as_they_were():
    batch = np.full((2, 3, 4), 0.5)
    encode(batch)
    assert (batch == 0.5).all()
    assert batch.dtype == np.float64


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (7, TypeError, "images is a int; a batch is"),
        (None, TypeError, "images is a NoneType"),
        ("cat.png", TypeError, "images is a str; .* a list of PNG, JPEG"),
        (b"\x89PNG\r\n\x1a\n", TypeError, "images is a bytes"),
        (Image.new("L", (2, 2)), TypeError, "images is a Image"),
        ([], ValueError, "images is empty"),
        ([[[0.5]]], TypeError, "image 0 is a list"),
        ([GRAY, "cat.png"], TypeError, "image 0 is a ndarray"),
        ([GRAY, GRAY.T], ValueError, r"image 1 has shape \(4, 3\) and image 0 \(3, 4\)"),
        ([GRAY, GRAY / 255], TypeError, "image 1 is float64 and image 0 uint8"),
        (GRAY, ValueError, r"add the batch axis: images\[None\]"),
        (np.float32(1), ValueError, r"the array has shape \(\)"),
        (np.zeros((1, 1, 1, 1, 1), np.uint8), ValueError, "a batch is"),
        (np.zeros((0, 3, 4), np.uint8), ValueError, "is empty"),
        (np.zeros((2, 0, 4), np.uint8), ValueError, "is empty"),
        (np.zeros((2, 3, 4), np.int64), TypeError, "the array is int64; accepted are uint8"),
        (np.zeros((2, 3, 4), bool), TypeError, "the array is bool"),
        (np.zeros((2, 3, 4), object), TypeError, "the array is object"),
        (np.zeros((2, 3, 4), np.complex64), TypeError, "the array is complex64"),
        (np.zeros((2, 3, 4), np.longdouble), TypeError, "the array is (float|longdouble)"),
        (np.full((2, 3, 4), 255.0), ValueError, r"found 255\.\.255; divide"),
        (np.full((2, 3, 4), -0.5), ValueError, r"found -0\.5"),
        (np.stack([GRAY * 0.0, GRAY * np.nan]), ValueError, "image 1 holds NaN or infinity"),
        (np.stack([GRAY + np.inf, GRAY * 0.0]), ValueError, "image 0 holds NaN or infinity"),
        ([b"%PDF..."], ValueError, "image 0 is no PNG, JPEG, WebP"),
        ([b""], ValueError, "image 0 is no PNG"),
        ([file_bytes("PNG"), bytearray(b"x")], TypeError, "image 1 is a bytearray"),
        ([Image.new("CMYK", (2, 2))], ValueError, r"cannot write mode CMYK as PNG; convert it first"),
    ],
)
def test_junk_is_refused_with_what_was_wrong_and_what_is_accepted(images, error, message):
    with pytest.raises(error, match=message):
        encode(images)


def test_rounding_errors_just_outside_the_range_are_let_through():
    assert tensor(encode(np.full((1, 2, 2), 1.0005))).max() > 1


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.png"):
        encode([tmp_path / "missing.png"])


def test_a_file_of_another_format_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"image 0 \(.*notes\.txt\) is no PNG"):
        encode([tmp_path / "notes.txt"])


@pytest.mark.parametrize(
    ("images", "layout", "message"),
    [
        (GRAY[None], "CHW", "accepted are NHWC, NCHW, NHW and None"),
        (GRAY[None], "NHWC", "layout NHWC has 4 axes"),
        (GRAY[None, None], "NHW", "layout NHW has 3 axes"),
        ([b"\xff\xd8\xff"], "NHWC", "encoded files"),
    ],
)
def test_a_layout_that_does_not_fit_the_batch_is_refused(images, layout, message):
    with pytest.raises(ValueError, match=message):
        encode(images, layout)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_files_of_every_format_are_sent_as_they_are(kind):
    content = file_bytes(kind)
    assert parts(encode([content])) == [(f"image/{kind.lower()}", content)]


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I;16L"])
def test_pillow_images_of_16_bits_keep_all_of_them(mode):
    pixels = (np.arange(12).reshape(3, 4) * 5000).astype(">u2" if mode == "I;16B" else "<u2")
    ((_, content),) = parts(encode([Image.frombytes(mode, (4, 3), pixels.tobytes())]))
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(content))), pixels)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_path_its_bytes_and_the_open_image_are_shown_alike(tmp_path, kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010E] = "a description that is nobody's business"
    pixels = np.kron(np.arange(6, dtype=np.uint8).reshape(2, 3) * 40, np.ones((16, 16), np.uint8))
    path = tmp_path / f"picture.{kind.lower()}"
    options = {"lossless": True} if kind == "WEBP" else {}
    Image.fromarray(pixels).convert("RGB").save(path, kind, exif=exif, **options)
    with Image.open(path) as picture:
        sent = [content for _, content in parts(encode([path, path.read_bytes(), picture]))]
    shown = [np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content)))) for content in sent]
    assert shown[0].shape[:2] == ((48, 32) if orientation >= 5 else (32, 48))
    np.testing.assert_array_equal(shown[1], shown[0])
    np.testing.assert_array_equal(shown[2], shown[0])
    assert b"business" not in sent[2]
