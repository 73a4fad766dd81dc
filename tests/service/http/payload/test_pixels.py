"""What pictures become, pixel by pixel, against files written here and not by the library that reads them."""

import contextlib
import io
import struct
import zlib

import numpy as np
import orjson
import pytest
from PIL import ExifTags, Image

from acclimate_service.http.payload import PayloadError, PayloadLimits, decode, decode_labelled

LIMITS = PayloadLimits()
HEIGHT, WIDTH = 8, 6
SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def chunk(name, content):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def packed(samples, depth):
    """Rows of samples [H, W * S] with a filter byte of 0 each."""
    rows = []
    for row in samples:
        bits = "".join(f"{int(value):0{depth}b}" for value in row)
        bits += "0" * (-len(bits) % 8)
        rows.append(b"\0" + int(bits, 2).to_bytes(len(bits) // 8, "big"))
    return b"".join(rows)


def png(samples, depth, kind, *, key=None, palette=b"", alpha=b"", interlaced=False, rows=None, extra=b""):
    """A PNG of samples [H, W, S]."""
    height, width, _ = samples.shape
    passes = ADAM7 if interlaced else ((0, 0, 1, 1),)
    parts = [samples[y::dy, x::dx] for x, y, dx, dy in passes]
    data = b"".join(packed(part.reshape(len(part), -1), depth) for part in parts if part.size)
    if rows is not None:
        data = data[: rows * (len(data) // height)]
    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, interlaced)
    colours = chunk(b"PLTE", palette) if palette else b""
    clear = (
        chunk(b"tRNS", np.array(key, ">u2").tobytes()) if key is not None else chunk(b"tRNS", alpha) if alpha else b""
    )
    content = chunk(b"IDAT", zlib.compress(data))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + colours + clear + content + chunk(b"IEND", b"")


def drawn(depth, channels, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**depth, (HEIGHT, WIDTH, channels))


def eight_bits(samples, depth):
    """As 8 bits: grey of 16 bits is rounded, colour of 16 bits cut."""
    if depth == 16:
        return np.round(samples / 257) if samples.shape[2] == 1 else samples >> 8
    return samples * (255 // (2**depth - 1))


def by_body(data, spec):
    return decode(data, "image/png", {}, spec, LIMITS)


def by_form(data, spec):
    part = b'--line\r\nContent-Disposition: form-data; name="i"; filename="x"\r\n\r\n' + data + b"\r\n--line--\r\n"
    return decode(part, "multipart/form-data; boundary=line", {}, spec, LIMITS)


def by_json(data, spec):
    import base64

    body = orjson.dumps({"images": [base64.b64encode(data).decode()]})
    return decode(body, "application/json", {}, spec, LIMITS)


def by_labelled_body(data, spec):
    return decode_labelled(data, "image/png", {"X-Labels": "[0]"}, spec, LIMITS, ("a",))[0]


def by_labelled_form(data, spec):
    part = b'--line\r\nContent-Disposition: form-data; name="i"; filename="x"\r\n\r\n' + data + b"\r\n"
    part += b'--line\r\nContent-Disposition: form-data; name="labels"\r\n\r\n[0]\r\n--line--\r\n'
    return decode_labelled(part, "multipart/form-data; boundary=line", {}, spec, LIMITS, ("a",))[0]


def by_labelled_json(data, spec):
    import base64

    body = orjson.dumps({"images": [base64.b64encode(data).decode()], "labels": [0]})
    return decode_labelled(body, "application/json", {}, spec, LIMITS, ("a",))[0]


@pytest.fixture(params=[by_body, by_form, by_json, by_labelled_body, by_labelled_form, by_labelled_json])
def seen(request, input_spec):
    """What the model sees of a file, [H, W, C], by every way that a picture comes."""

    def read(data, channels, height=HEIGHT, width=WIDTH):
        spec = input_spec(channels=channels, height=height, width=width)
        return request.param(data, spec)[0].transpose(1, 2, 0)

    return read


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_grey_of_every_depth_and_its_transparent_shade(seen, depth, interlaced):
    samples = drawn(depth, 1)
    expected = eight_bits(samples, depth)
    np.testing.assert_array_equal(seen(png(samples, depth, 0, interlaced=interlaced), 1), expected)
    shade = samples[0, 0, 0]
    clear = np.where(samples == shade, 0, expected)
    np.testing.assert_array_equal(seen(png(samples, depth, 0, key=[shade], interlaced=interlaced), 1), clear)


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("depth", [8, 16])
def test_colour_of_both_depths_and_its_transparent_colour(seen, depth, interlaced):
    samples = drawn(depth, 3)
    samples[2, 3] = samples[0, 0]
    expected = eight_bits(samples, depth)
    clear = np.where((samples == samples[0, 0]).all(axis=2, keepdims=True), 0, expected)
    assert (clear != expected).any()
    data = png(samples, depth, 2, key=samples[0, 0], interlaced=interlaced)
    np.testing.assert_array_equal(seen(data, 3), clear)
    np.testing.assert_array_equal(seen(png(samples, depth, 2, interlaced=interlaced), 3), expected)


@pytest.mark.parametrize(("kind", "channels"), [(0, 1), (2, 3)])
def test_only_an_equal_colour_of_16_bits_is_transparent(seen, kind, channels):
    samples = np.full((HEIGHT, WIDTH, channels), 0x1234)
    near = [0x1235] * channels
    assert (seen(png(samples, 16, kind, key=near), channels) > 0).all()
    assert (seen(png(samples, 16, kind, key=[0x1234] * channels), channels) == 0).all()


@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize(("kind", "channels"), [(4, 1), (6, 3)])
def test_alpha_is_composited_on_black(seen, kind, channels, depth):
    samples = drawn(depth, channels + 1)
    colour, alpha = (samples >> 8 if depth == 16 else samples)[..., :channels], samples[..., channels:] >> (depth - 8)
    expected = colour * alpha / 255
    assert np.abs(seen(png(samples, depth, kind), channels) - expected).max() <= 1


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_palettes_of_every_depth_and_their_transparent_entries(seen, depth):
    samples = drawn(depth, 1)
    palette = np.random.default_rng(5).integers(0, 256, (2**depth, 3), dtype=np.uint8)
    expected = palette[samples[..., 0]]
    np.testing.assert_array_equal(seen(png(samples, depth, 3, palette=palette.tobytes()), 3), expected)
    clear = np.where(samples == 0, 0, expected)
    data = png(samples, depth, 3, palette=palette.tobytes(), alpha=b"\0")
    np.testing.assert_array_equal(seen(data, 3), clear)


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("rows", [0, 1, HEIGHT - 1])
def test_a_png_with_missing_rows_is_refused(refusal, input_spec, rows, interlaced):
    data = png(drawn(8, 3), 8, 2, rows=rows, interlaced=interlaced)
    error = refusal(data, "image/png", input_spec(height=HEIGHT, width=WIDTH))
    assert error.code == "undecodable_image"
    assert "rows are missing" in error.detail or "truncated" in error.detail


def gradient():
    rows, columns = np.indices((32, 48))
    return Image.fromarray(np.stack((rows * 7, columns * 5, rows + columns), axis=-1).astype(np.uint8))


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


CUT = {
    "a plain JPEG": {},
    "a progressive JPEG": {"progressive": True},
    "a JPEG with restarts": {"restart_marker_blocks": 1},
}


@pytest.mark.parametrize("what", CUT)
@pytest.mark.parametrize("closed", [b"", b"\xff\xd9"])
def test_a_jpeg_that_is_cut_is_refused_though_it_is_closed_with_an_end_marker(refusal, input_spec, what, closed):
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (32, 48, 3), dtype=np.uint8))
    data = encoded(noise, "JPEG", quality=90, **CUT[what])
    spec = input_spec(height=32, width=48)
    start = data.index(b"\xff\xda") + 20
    for end in range(start, len(data) - 4, (len(data) - start) // 12):
        assert refusal(data[:end] + closed, "image/jpeg", spec).code == "undecodable_image", end


def test_a_jpeg_with_a_long_tail_or_long_segments_is_accepted(seen):
    data = encoded(gradient(), "JPEG", quality=95)
    expected = seen(data, 3, 32, 48)
    assert np.abs(expected.astype(int) - np.asarray(gradient())).max() < 12
    segment = b"\xff\xe5\xff\xff" + b"\xff\xda" * 32_766 + b"x"
    for other in (data + b"\xff\xda" * 1000, data[:2] + segment * 20 + data[2:], data[:-2] + b"\0\0" + data[-2:]):
        np.testing.assert_array_equal(seen(other, 3, 32, 48), expected)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 2}, {"quality": 40}]
)
def test_a_jpeg_becomes_what_pillow_makes_of_it(seen, mode, options):
    data = encoded(gradient().convert(mode), "JPEG", **options)
    expected = Image.open(io.BytesIO(data))
    np.testing.assert_array_equal(seen(data, 3, 32, 48), np.asarray(expected.convert("RGB")))


LOSSLESS = [
    ("WEBP", "RGB", {"lossless": True}),
    ("BMP", "RGB", {}),
    ("BMP", "L", {}),
    ("BMP", "1", {}),
    ("BMP", "P", {}),
    ("GIF", "P", {}),
    ("GIF", "L", {}),
    *(("TIFF", mode, {}) for mode in ("1", "L", "P", "RGB")),
    *(("TIFF", "RGB", {"compression": name}) for name in ("tiff_lzw", "tiff_deflate", "packbits")),
]


@pytest.mark.parametrize(("kind", "mode", "options"), LOSSLESS)
def test_other_formats_keep_every_pixel(seen, kind, mode, options):
    image = gradient().convert(mode)
    np.testing.assert_array_equal(seen(encoded(image, kind, **options), 3, 32, 48), np.asarray(image.convert("RGB")))


def test_a_tiff_of_16_bits_and_one_of_inks(seen):
    ramp = (np.arange(32 * 48).reshape(32, 48) * 40).astype(np.uint16)
    for order in ("<u2", ">u2"):
        data = encoded(Image.fromarray(ramp.astype(order)), "TIFF")
        np.testing.assert_array_equal(seen(data, 1, 32, 48)[..., 0], np.round(ramp / 257))
    inks = gradient().convert("CMYK")
    np.testing.assert_array_equal(seen(encoded(inks, "TIFF"), 3, 32, 48), np.asarray(inks.convert("RGB")))


@pytest.mark.parametrize(("kind", "options"), [("WEBP", {"lossless": True}), ("GIF", {}), ("TIFF", {}), ("PNG", {})])
def test_of_an_animation_the_first_frame_is_taken(seen, kind, options):
    first = gradient().convert("P") if kind == "GIF" else gradient()
    second = Image.new(first.mode, first.size, 3)
    data = encoded(first, kind, save_all=True, append_images=[second], **options)
    np.testing.assert_array_equal(seen(data, 3, 32, 48), np.asarray(first.convert("RGB")))


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "BMP", "TIFF", "PNG"])
def test_a_file_that_is_cut_is_refused_or_whole(refusal, read, input_spec, kind):
    data = encoded(gradient(), kind)
    spec = input_spec(height=32, width=48)
    whole = read(data, "image/png", spec)
    for end in range(1, len(data), max(1, len(data) // 23)):
        with contextlib.suppress(PayloadError):
            np.testing.assert_array_equal(read(data[:end], "image/png", spec), whole)
    assert refusal(data[: len(data) // 2], "image/png", spec).code == "undecodable_image"


@pytest.mark.parametrize(
    ("kind", "options"),
    [("JPEG", {"quality": 100, "subsampling": 0}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})],
)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_shown_upright_in_every_format(seen, kind, options, orientation):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encoded(gradient(), kind, exif=exif, **options)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    height, width = expected.shape[:2]
    assert (width < height) is (orientation >= 5)
    np.testing.assert_array_equal(seen(data, 3, height, width), expected)
