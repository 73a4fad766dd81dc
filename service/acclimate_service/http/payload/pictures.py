"""Image files as people have them: PNG, JPEG, WebP, GIF, BMP and TIFF, told by their content.

A file's header is read by walking its segments: nothing is decompressed or allocated before the size is known, and what
is no part of the picture (texts, profiles, thumbnails, further frames) is not read at all. A file that lacks a part of
its picture is refused, however it ends.
"""

import io
import logging
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import simplejpeg
from PIL import BmpImagePlugin, GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin
from PIL.ImageFile import ImageFile

# Senders decide what Pillow says of their files: the log is not for them, nor the memory of what was warned of.
logging.getLogger("PIL").setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", module=r"PIL\.")

Decode: TypeAlias = Callable[[], Image.Image]

MAX_SEGMENTS: Final = 65_536
"""Segments of a file: chunks of PNG, markers of JPEG, blocks of GIF."""
MAX_SCANS: Final = 64
"""Scans of a JPEG. Every scan visits every pixel, however few bytes it has; real progressive files have about ten."""
MAX_EXIF: Final = 65_536
"""Bytes of EXIF data in which an orientation is looked for; more fit into no JPEG."""
MAX_TIFF_TAGS: Final = 512
_PIECE: Final = 16 * 1024
_ORIENTATION: Final = 0x0112
_TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By EXIF orientation, what shows the picture upright."""
_PNG_DEPTHS: Final = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_PNG_SAMPLES: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_ADAM7: Final = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""Of each pass of an interlaced PNG: first column and row, steps between columns and rows."""
_JPEG_MARKER: Final = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_JPEG_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_TIFF_UNITS: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
_MODES: Final = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "I;16")


class Unreadable(Exception):
    """A file that is refused; the text says why."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A file whose header was read.

    Args:
        width, height: of the picture as it is shown.
        decode: blocking; gives it upright, or raises `Unreadable`.
    """

    width: int
    height: int
    decode: Decode


def read_header(data: bytes) -> Picture:
    """Read the header of an image file.

    Raises:
        Unreadable: it is of no format that is read, or not whole.
    """
    read = next((read for signature, read in _FORMATS if signature.match(data)), None)
    if read is None:
        found = f"it starts with {data[:4].hex(' ')}" if data else "it is empty"
        raise Unreadable(f"it is no PNG, JPEG, WebP, GIF, BMP or TIFF file: {found}")
    try:
        width, height, orientation, decode = read(data)
    except (struct.error, IndexError) as error:
        raise Unreadable("it ends within its header") from error
    if width < 1 or height < 1:
        raise Unreadable(f"it says that it is {width} wide and {height} high")
    if orientation >= 5:
        width, height = height, width
    return Picture(width, height, partial(_upright, decode, orientation))


def _upright(decode: Decode, orientation: int) -> Image.Image:
    try:
        image = decode()
    except Unreadable:
        raise
    except Exception as error:  # Pillow's parsers raise many types on hostile input, and all mean the same
        raise Unreadable(str(error)[:120]) from error
    turn = _TURNS.get(orientation)
    return image if turn is None else image.transpose(turn)


def _orientation(exif: bytes) -> int:
    """EXIF orientation, 1 where there is none; broken metadata does not spoil the pixels."""
    if not exif or len(exif) > MAX_EXIF:
        return 1
    try:
        found = Image.Exif()
        found.load(exif)
        value = found.get(_ORIENTATION)
    except Exception:  # as above
        return 1
    return value if value in _TURNS else 1


def _loaded(plugin: type[ImageFile], data: bytes, width: int, height: int) -> Image.Image:
    """The first frame, by Pillow. The plugins are called directly: `Image.open` has a pixel limit of its own."""
    image = plugin(io.BytesIO(data))
    if image.size != (width, height):
        raise Unreadable("its header and its content have different sizes")
    image.load()
    if image.mode not in _MODES:
        raise Unreadable(f"its pixels are {image.mode}, which is not read")
    return image


# PNG


def _png(data: bytes) -> tuple[int, int, int, Decode]:
    kept, pixels, key, orientation = [data[:8]], [], b"", 1
    width, height, depth, kind, interlaced = struct.unpack(">IIBB2xB", data[16:29])
    for name, start, end in _png_chunks(data):
        if name == b"IDAT":
            pixels.append(data[start:end])
        elif name == b"eXIf":
            orientation = _orientation(data[start:end])
        elif name == b"tRNS" and kind in (0, 2):
            key = data[start:end]
        if name in (b"IHDR", b"PLTE", b"IDAT", b"IEND") or (name == b"tRNS" and kind == 3):
            kept.append(data[start - 8 : end + 4])
    if kept[1][4:8] != b"IHDR" or depth not in _PNG_DEPTHS.get(kind, ()) or interlaced > 1:
        raise Unreadable("it has no PNG header that is read")
    expected = _png_bytes(width, height, depth * _PNG_SAMPLES[kind], interlaced=interlaced == 1)
    if len(key) != {0: 2, 2: 6}.get(kind) or kind not in (0, 2):
        key = b""

    def decode() -> Image.Image:
        image = _loaded(PngImagePlugin.PngImageFile, b"".join(kept), width, height)
        if interlaced or not np.asarray(image.crop((0, height - 1, width, height))).any():
            _check_inflated(pixels, expected)  # only then: a last row that is not black was there, and all before it
        return _without_key(image, depth, key, b"".join(kept)) if key else image

    return width, height, orientation, decode


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name of every chunk up to the last one, and where its content is."""
    at = 8
    for _ in range(MAX_SEGMENTS):
        length = int.from_bytes(data[at : at + 4], "big")
        name, end = data[at + 4 : at + 8], at + 8 + length
        if end + 4 > len(data):
            raise Unreadable("it is cut short")
        yield name, at + 8, end
        if name == b"IEND":
            return
        at = end + 4
    raise Unreadable(f"it has more than {MAX_SEGMENTS} chunks")


def _png_bytes(width: int, height: int, bits: int, *, interlaced: bool) -> int:
    """Bytes of all rows, each with that of its filter."""
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    sizes = (((width - x + dx - 1) // dx, (height - y + dy - 1) // dy) for x, y, dx, dy in passes)
    return sum(rows * (1 + (columns * bits + 7) // 8) for columns, rows in sizes if columns > 0 and rows > 0)


def _check_inflated(pieces: list[bytes], expected: int) -> None:
    """Make sure that all rows are there: Pillow leaves those black that are not."""
    inflater, found = zlib.decompressobj(), 0
    try:
        for piece in pieces:
            for start in range(0, len(piece), _PIECE):
                found += len(inflater.decompress(piece[start : start + _PIECE]))
                if found >= expected:
                    return
        found += len(inflater.flush())
    except zlib.error as error:
        raise Unreadable(f"its pixels cannot be inflated: {error}") from error
    if found < expected:
        raise Unreadable(f"rows are missing: it has {found} of {expected} bytes of pixels")


def _without_key(image: Image.Image, depth: int, key: bytes, data: bytes) -> Image.Image:
    """The picture with the one colour black that is transparent: an equal one in all bits that the file has."""
    colour = np.frombuffer(key, ">u2") & (2**depth - 1)
    if depth == 16 and image.mode == "RGB":  # Pillow keeps the upper bytes; read again, the lower ones
        again = PngImagePlugin.PngImageFile(io.BytesIO(data))
        again.tile = [tile._replace(args="RGB;16L") for tile in again.tile]
        again.load()
        pixels = np.array(image)
        samples = pixels.astype(np.uint16) << 8 | np.asarray(again)
    elif depth == 16:
        samples = pixels = np.array(image)
    else:
        samples = pixels = np.array(image.convert("RGB" if len(colour) == 3 else "L"))
        colour = colour * (255 // (2**depth - 1))
    equal = samples == colour if len(colour) == 3 else samples[..., None] == colour
    pixels[equal.all(axis=-1)] = 0
    return Image.fromarray(pixels)


# JPEG


def _jpeg(data: bytes) -> tuple[int, int, int, Decode]:
    orientation, frame, scans = 1, None, 0
    for marker, content in _jpeg_segments(data):
        if marker in _JPEG_FRAMES and frame is None:
            frame = struct.unpack(">xHHB", data[content : content + 6])
        elif marker == 0xDA:
            scans += 1
            if scans > MAX_SCANS:
                raise Unreadable(f"it is a JPEG of more than {MAX_SCANS} scans")
        elif marker == 0xE1 and data.startswith(b"Exif\0\0", content) and not scans:
            length = int.from_bytes(data[content - 2 : content], "big")
            orientation = _orientation(data[content : content + length - 2])
    if frame is None or not scans:
        raise Unreadable("it is a JPEG without a picture")
    height, width, components = frame
    return width, height, orientation, partial(_decode_jpeg, data, components, width, height)


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Every marker up to the end of the picture, and where the content of its segment begins."""
    at = 2
    for _ in range(MAX_SEGMENTS):
        found = _JPEG_MARKER.search(data, at)
        if found is None or (marker := data[found.end() - 1]) == 0xD9:
            return
        at = found.end()
        if marker in (0x01, 0xD8):
            continue
        yield marker, at + 2
        at += int.from_bytes(data[at : at + 2], "big")
    raise Unreadable(f"it has more than {MAX_SEGMENTS} segments")


def _decode_jpeg(data: bytes, components: int, width: int, height: int) -> Image.Image:
    """The pixels, by libjpeg-turbo, whose warnings Pillow keeps to itself: rows that are missing come out grey."""
    colours = {1: "GRAY", 3: "RGB"}.get(components)
    try:
        pixels = simplejpeg.decode_jpeg(data, colours or "CMYK")
    except ValueError as error:
        if "extraneous bytes before marker" in str(error):  # padding, as cameras leave it; all else is a loss
            pixels = simplejpeg.decode_jpeg(data, colours or "CMYK", strict=False)
        elif "subsampling" in str(error):  # one that TurboJPEG has no name for
            return _loaded(JpegImagePlugin.JpegImageFile, data, width, height)
        else:
            raise
    if colours is None:  # what CMYK becomes is decided by Pillow's reader
        return _loaded(JpegImagePlugin.JpegImageFile, data, width, height)
    return Image.fromarray(pixels.squeeze(-1) if components == 1 else pixels)


# the others


def _webp(data: bytes) -> tuple[int, int, int, Decode]:
    kind, at, orientation = data[12:16], 12, 1
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(data[start : start + 3], "little") for start in (24, 27))
    elif kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        width, height = (side & 0x3FFF for side in struct.unpack("<HH", data[26:30]))
    for _ in range(MAX_SEGMENTS):
        name, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"EXIF":
            orientation = _orientation(data[at + 8 : at + 8 + length])
        at += 8 + length + length % 2
        if at >= len(data):
            break
    return width, height, orientation, partial(_loaded, WebPImagePlugin.WebPImageFile, data, width, height)


def _gif(data: bytes) -> tuple[int, int, int, Decode]:
    width, height, packed = struct.unpack("<HHB", data[6:11])
    at = 13 + (3 << (packed & 7) + 1 if packed & 0x80 else 0)
    kept, control = data[:at], b""
    for _ in range(MAX_SEGMENTS):
        start, kind = at, data[at]
        if kind == 0x2C:
            local = data[at + 9]
            at += 11 + (3 << (local & 7) + 1 if local & 0x80 else 0)
        elif kind == 0x21:
            at += 2
        else:
            raise Unreadable("it is a GIF without a picture")
        while data[at]:
            at += 1 + data[at]
        at += 1
        if kind == 0x2C:
            first = kept + control + data[start:at] + b";"  # without comments, which Pillow joins one by one
            return width, height, 1, partial(_loaded, GifImagePlugin.GifImageFile, first, width, height)
        if data[start + 1] == 0xF9:
            control = data[start:at]
    raise Unreadable(f"it has more than {MAX_SEGMENTS} blocks")


def _bmp(data: bytes) -> tuple[int, int, int, Decode]:
    (header,) = struct.unpack("<I", data[14:18])
    if header == 12:
        width, height = struct.unpack("<HH", data[18:22])
    else:
        width, height, compression = struct.unpack("<ii4xI", data[18:34])
        if compression not in (0, 3, 6):
            raise Unreadable("it is a compressed BMP, which is not read")
    height = abs(height)  # below zero where the rows run downwards
    return width, height, 1, partial(_loaded, BmpImagePlugin.BmpImageFile, data, width, height)


def _tiff(data: bytes) -> tuple[int, int, int, Decode]:
    order = "<" if data[:2] == b"II" else ">"
    (start,) = struct.unpack(f"{order}I", data[4:8])
    (number,) = struct.unpack(f"{order}H", data[start : start + 2])
    if number > MAX_TIFF_TAGS:
        raise Unreadable(f"it is a TIFF of more than {MAX_TIFF_TAGS} tags")
    tags, total = {}, 0
    for at in range(start + 2, start + 2 + 12 * number, 12):
        tag, kind, count = struct.unpack(f"{order}HHI", data[at : at + 8])
        total += _TIFF_UNITS.get(kind, 1) * count
        tags[tag] = struct.unpack(order + ("H2x" if kind == 3 else "I"), data[at + 8 : at + 12])[0]
    if total > len(data):  # tags that share their values would be read once for each
        raise Unreadable("it is a TIFF of tags that are larger than the file")
    width, height = tags.get(256, 0), tags.get(257, 0)
    if tags.get(_ORIENTATION, 1) >= 5:  # Pillow itself turns pictures of this format, and of no other
        width, height = height, width
    return width, height, 1, partial(_decode_tiff, data, width, height)


def _decode_tiff(data: bytes, width: int, height: int) -> Image.Image:
    image: Image.Image = TiffImagePlugin.TiffImageFile(io.BytesIO(data))
    if image.size not in ((width, height), (height, width)):  # as stored
        raise Unreadable("its header and its content have different sizes")
    image.load()
    if image.mode == "I;16B":
        return Image.fromarray(np.asarray(image).astype(np.uint16))
    if image.mode not in _MODES:
        raise Unreadable(f"its pixels are {image.mode}, which is not read")
    return image.convert("RGB") if image.mode in ("CMYK", "YCbCr") else image


_FORMATS: Final[tuple[tuple[re.Pattern[bytes], Callable[[bytes], tuple[int, int, int, Decode]]], ...]] = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), _png),
    (re.compile(rb"\xff\xd8\xff"), _jpeg),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), _webp),
    (re.compile(rb"GIF8[79]a"), _gif),
    (re.compile(rb"BM"), _bmp),
    (re.compile(rb"II\*\0|MM\0\*"), _tiff),
)
