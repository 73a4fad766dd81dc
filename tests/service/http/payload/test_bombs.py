import resource
import struct
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from acclimate_service.http.payload import PayloadLimits, images, pictures
from acclimate_store import Resize

PNG = "image/png"
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.fixture(scope="module")
def one_bit_png():
    """A valid black-and-white PNG of any size, made without holding its pixels."""

    def encode(width, height):
        compressor = zlib.compressobj(9)
        row = bytes(1 + (width + 7) // 8)
        pixels = b"".join(compressor.compress(row) for _ in range(height)) + compressor.flush()
        header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")

    return encode


@pytest.fixture
def resizing(input_spec):
    resize = Resize(size=32, interpolation="bilinear", antialias=True, crop=32)
    return input_spec(channels=1, height=32, width=32, resize=resize)


def test_a_30000_by_30000_png_is_refused_by_its_header_in_constant_memory(refusal, one_bit_png, resizing):
    body = one_bit_png(30_000, 30_000)
    assert len(body) < 200_000
    before = peak_bytes()
    error = refusal(body, PNG, resizing)
    assert peak_bytes() - before < 50e6
    assert error.code == "too_many_pixels"
    assert "900000000 pixels" in error.detail
    assert "16777216" in error.detail


def test_the_largest_image_allowed_is_decoded(read, one_bit_png, resizing):
    assert read(one_bit_png(4096, 4096), PNG, resizing).shape == (1, 1, 32, 32)


def test_many_large_images_are_refused_together(refusal, one_bit_png, form, resizing):
    body, content_type = form([one_bit_png(1000, 1000)] * 5)
    error = refusal(body, content_type, resizing, limits=PayloadLimits(max_total_pixels=4_000_000))
    assert error.code == "too_many_pixels"
    assert "5000000 pixels together" in error.detail


def test_a_thin_image_that_resizing_would_blow_up_is_refused(refusal, file, input_spec):
    resize = Resize(size=224, interpolation="bilinear", antialias=True, crop=224)
    spec = input_spec(height=224, width=224, resize=resize)
    for size in ((1, 10_000), (10_000, 1)):
        assert refusal(file(Image.new("RGB", size)), PNG, spec).code == "too_many_pixels"


def test_a_thin_image_that_is_stretched_costs_no_more_than_another(read, file, input_spec):
    resize = Resize(size=224, interpolation="bilinear", antialias=True, crop=None)
    spec = input_spec(height=224, width=224, resize=resize)
    assert read(file(Image.new("RGB", (1, 10_000))), PNG, spec).shape == (1, 3, 224, 224)


def test_a_jpeg_of_a_hundred_scans_is_refused(read, refusal, file, input_spec):
    noise = np.random.default_rng(0).integers(0, 256, (32, 32), dtype=np.uint8)
    data = file(noise, "JPEG", progressive=True)
    spec = input_spec(channels=1, height=32, width=32)
    assert read(data, "image/jpeg", spec).shape == (1, 1, 32, 32)
    last_scan = data[data.rindex(b"\xff\xda") : -2]
    error = refusal(data[:-2] + last_scan * 100 + data[-2:], "image/jpeg", spec)
    assert error.code == "undecodable_image"
    assert "64 scans" in error.detail


def test_texts_and_profiles_of_a_png_are_not_inflated(read, file, grey):
    data = file(Image.new("L", (6, 8), 7))
    bomb = zlib.compress(bytes(100_000_000), 9)
    texts = chunk(b"zTXt", b"Comment\x00\x00" + bomb) * 60 + chunk(b"iCCP", b"Profile\x00\x00" + bomb)
    before = peak_bytes()
    assert (read(data[:33] + texts + data[33:], PNG, grey) == 7).all()
    assert peak_bytes() - before < 50e6


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_size_that_the_model_does_not_take_is_refused_before_anything_is_decoded(
    refusal, file, grey, kind, monkeypatch
):
    decoded = []
    monkeypatch.setattr(pictures, "_upright", lambda *_: decoded.append(True))
    error = refusal(file(Image.new("RGB", (60, 80), 7), kind), PNG, grey)
    assert (error.code, decoded) == ("wrong_shape", [])
    assert "60 wide and 80 high" in error.detail


def test_each_picture_is_opened_once_and_decoded_once(read, file, grey, monkeypatch):
    calls = []
    for name in ("read_header", "_decoded"):
        real = getattr(images, name)
        monkeypatch.setattr(images, name, lambda *given, name=name, real=real: calls.append(name) or real(*given))
    read(file(Image.new("L", (6, 8), 7)), PNG, grey)
    assert calls == ["read_header", "_decoded"]


def gif_of_comments(blocks):
    start = b"GIF89a" + struct.pack("<HHB", 6, 8, 0) + b"\0\0" + b"\x21\xfe"
    return start + (b"\xff" + b"c" * 255) * blocks + b"\0;"


def tiff_of_tags(number, count):
    """Tags that all say that their values are most of the file."""
    tags = b"".join(struct.pack("<HHII", (40_000 + at) % 2**16, 7, count, 0) for at in range(number))
    return b"II*\0" + struct.pack("<IH", 8, number) + tags + bytes(count)


HOSTILE = {
    "a GIF of comments": lambda: gif_of_comments(100_000),
    "a TIFF of tags that share their values": lambda: tiff_of_tags(500, 10_000_000),
    "a TIFF of many tags": lambda: tiff_of_tags(60_000, 10),
    "a PNG of empty chunks": lambda: b"\x89PNG\r\n\x1a\n" + chunk(b"teXt", b"") * 1_000_000,
    "a JPEG of markers": lambda: b"\xff\xd8" + b"\xff\xe0\0\2" * 2_000_000,
    "a JPEG of stuffed bytes": lambda: b"\xff\xd8\xff\xda\0\2" + b"\xff\0" * 10_000_000,
    "a WebP of chunks": lambda: b"RIFF\xff\xff\xff\x7fWEBP" + b"EXIF\0\0\0\0" * 2_000_000,
    "a WebP that says that it is huge": lambda: (
        b"RIFF\x20\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\x3f\0" * 2 + bytes(20)
    ),
    "a BMP that says that it is huge": lambda: (
        b"BM" + bytes(12) + struct.pack("<IiiHHI", 40, 30_000, -30_000, 1, 24, 0) + bytes(99)
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_costs_little_time_and_memory(refusal, resizing, what):
    body = HOSTILE[what]()
    before, began = peak_bytes(), time.process_time()
    assert refusal(body, PNG, resizing).code in ("undecodable_image", "too_many_pixels")
    assert time.process_time() - began < 2
    assert peak_bytes() - before < 100e6


@pytest.mark.integration
def test_no_file_writes_into_the_log_of_the_service():
    """In a process of its own, where no warning is an error."""
    program = """
import io, struct
from PIL import Image
from acclimate_service.http.payload import PayloadError, PayloadLimits, decode
from acclimate_store import InputSpec

buffer = io.BytesIO()
Image.new("RGB", (6, 8)).save(buffer, "TIFF")
data = bytearray(buffer.getvalue())
at = data.index(struct.pack("<HHI", 277, 3, 1)) + 8  # samples per pixel
data[at : at + 2] = b"\\xff\\xff"
spec = InputSpec(channels=3, height=8, width=6, mean=(0.5,) * 3, std=(0.5,) * 3)
for sent in (bytes(data), bytes(data[:-3])):
    try:
        decode(sent, "image/tiff", {}, spec, PayloadLimits())
    except PayloadError as error:
        print(error.code)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (["undecodable_image"] * 2, "")
