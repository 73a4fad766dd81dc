import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms
from torchvision.transforms import v2

from acclimate_store import Resize

PNG = "image/png"
JPEG = "image/jpeg"


@pytest.fixture(scope="module")
def colours():
    """uint8 [8, 6, 3] in which every pixel differs."""
    return np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)


@pytest.fixture
def pixel(read, file, input_spec):
    """What the model sees of the first pixel of a one-colour image."""

    def call(image, channels=3, kind="PNG", **options):
        spec = input_spec(channels=channels, height=image.height, width=image.width)
        return read(file(image, kind, **options), PNG, spec)[0, :, 0, 0].tolist()

    return call


@pytest.fixture
def without_adobe(file):
    """A CMYK JPEG as other programs than Adobe's write it: no APP14 marker, ordinary polarity."""

    def encode(image):
        data = file(image.point(lambda value: 255 - value), "JPEG", quality=95)
        start = data.index(b"\xff\xee")
        return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4]) :]

    return encode


def test_a_png_keeps_every_pixel(read, file, rgb, colours):
    result = read(file(colours), PNG, rgb)
    assert result.dtype == np.uint8
    assert result.flags.c_contiguous
    np.testing.assert_array_equal(result[0], colours.transpose(2, 0, 1))


def test_the_content_and_not_its_type_tells_the_format(read, file, rgb, colours):
    jpeg = file(colours, "JPEG", quality=95)
    np.testing.assert_array_equal(read(jpeg, PNG, rgb), read(jpeg, JPEG, rgb))


def test_red_stays_red_in_both_formats(pixel):
    red = Image.new("RGB", (16, 16), (254, 0, 0))
    assert pixel(red) == [254, 0, 0]
    assert pixel(red, kind="JPEG") == pytest.approx([254, 0, 0], abs=2)


def test_grey_is_repeated_for_a_colour_model(pixel):
    assert pixel(Image.new("L", (4, 4), 77)) == [77, 77, 77]


def test_colour_becomes_luma_for_a_grey_model(pixel):
    assert pixel(Image.new("RGB", (4, 4), (255, 0, 0)), channels=1) == [76]


def test_transparency_is_composited_on_black_then_repeated(pixel):
    assert pixel(Image.new("LA", (4, 4), (200, 51))) == [40, 40, 40]
    assert pixel(Image.new("RGBA", (4, 4), (200, 100, 0, 51))) == [40, 20, 0]
    assert pixel(Image.new("RGBA", (4, 4), (200, 100, 50, 0)), channels=1) == [0]


def test_a_transparent_colour_of_an_opaque_mode_is_black(pixel):
    assert pixel(Image.new("RGB", (4, 4), (9, 8, 7)), transparency=(9, 8, 7)) == [0, 0, 0]
    assert pixel(Image.new("L", (4, 4), 9), transparency=9) == [0, 0, 0]


def test_palettes_are_looked_up(pixel):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    assert pixel(image) == [10, 20, 30]
    assert pixel(image, transparency=1) == [0, 0, 0]


def test_one_bit_images_are_black_and_white(pixel):
    assert pixel(Image.new("1", (4, 4), 1)) == [255, 255, 255]


def test_16_bit_grey_is_scaled_and_not_clipped(read, file, input_spec):
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    result = read(file(ramp), PNG, input_spec(channels=1, height=256, width=256))
    np.testing.assert_array_equal(result[0, 0], np.round(ramp / 257))
    assert (result.min(), result.max()) == (0, 255)


def test_cmyk_red_is_red_with_and_without_the_adobe_marker(read, file, without_adobe, input_spec):
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    spec = input_spec(height=16, width=16)
    for data in (file(red, "JPEG", quality=95), without_adobe(red)):
        r, g, b = read(data, JPEG, spec)[0].reshape(3, -1).mean(axis=1)
        assert r > 200
        assert max(g, b) < 80


def test_the_exif_orientation_is_applied(read, file, input_spec):
    stored = np.zeros((8, 16), np.uint8)
    stored[:, :8] = 255
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # to be shown turned by 90 degrees clockwise
    data = file(stored, "JPEG", quality=95, exif=exif)
    shown = read(data, JPEG, input_spec(channels=1, height=16, width=8))[0, 0]
    assert shown[:7].min() > 245
    assert shown[9:].max() < 10


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("junk", [b"Exif\x00\x00junkjunk", b"Exif\x00\x00II*\x00\xff\xff\xff\xff", b"Exif\x00\x00"])
def test_a_corrupt_exif_block_does_not_spoil_the_image(read, file, rgb, colours, junk):
    assert read(file(colours, "JPEG", exif=junk), JPEG, rgb).shape == (1, 3, 8, 6)


def test_a_colour_profile_is_ignored(read, file, rgb, colours):
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    np.testing.assert_array_equal(read(file(colours, icc_profile=profile), PNG, rgb), read(file(colours), PNG, rgb))


def test_an_animated_png_gives_its_first_frame(pixel):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((9, 8, 7), (1, 2, 3))]
    assert pixel(frames[0], save_all=True, append_images=frames[1:]) == [9, 8, 7]


@pytest.mark.parametrize("kind", ["PDF", "ICO", "PPM", "JPEG2000"])
def test_other_formats_are_refused(refusal, file, rgb, colours, kind):
    error = refusal(file(colours, kind), PNG, rgb)
    assert error.code == "undecodable_image"
    assert "no PNG, JPEG, WebP, GIF, BMP or TIFF file" in error.detail


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_a_truncated_file_is_refused(refusal, file, input_spec, kind, kept):
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = file(noise, kind)
    error = refusal(data[: int(len(data) * kept)], PNG, input_spec(height=64, width=64))
    assert error.code == "undecodable_image"
    assert "image 0 cannot be decoded" in error.detail


def test_a_damaged_png_is_refused(refusal, file, rgb, colours):
    data = bytearray(file(colours))
    data[data.index(b"IDAT") + 20] ^= 0xFF
    assert refusal(bytes(data), PNG, rgb).code == "undecodable_image"


def test_an_image_of_another_size_is_refused_without_resize(refusal, file, rgb):
    error = refusal(file(Image.new("RGB", (8, 6))), PNG, rgb)
    assert error.code == "wrong_shape"
    assert "8 wide and 6 high" in error.detail
    assert "takes 6 x 8" in error.detail


def test_a_model_of_other_channels_takes_no_image_files(refusal, file, input_spec, colours):
    error = refusal(file(colours), PNG, input_spec(channels=4))
    assert error.code == "wrong_shape"
    assert "send an array" in error.detail


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("size", "crop"), [(24, None), (32, 24)])
@pytest.mark.parametrize("shape", [(97, 64, 3), (20, 31, 3), (1, 1, 3)])
def test_resizing_is_that_of_torchvision(read, file, input_spec, antialias, interpolation, size, crop, shape):
    image = np.random.default_rng(2).integers(0, 256, shape, dtype=np.uint8)
    resize = Resize(size=size, interpolation=interpolation, antialias=antialias, crop=crop)
    side = crop or size
    result = read(file(image), PNG, input_spec(height=side, width=side, resize=resize))
    extent = size if crop else (size, size)
    mode = v2.InterpolationMode(interpolation)
    steps = [v2.ToImage(), v2.Resize(extent, mode, antialias=antialias), v2.CenterCrop(side)]
    expected = v2.Compose(steps)(Image.fromarray(image)).numpy()
    assert np.abs(result[0].astype(int) - expected).max() <= 1


def test_antialiasing_is_what_the_model_was_trained_with(read, file, input_spec):
    checkerboard = (np.indices((512, 512)).sum(axis=0) % 2 * 255).astype(np.uint8)

    def shrink(antialias):
        resize = Resize(size=224, interpolation="bilinear", antialias=antialias, crop=None)
        spec = input_spec(channels=1, height=224, width=224, resize=resize)
        return read(file(checkerboard), PNG, spec)[0, 0].astype(int)

    assert np.abs(shrink(True) - 127).max() <= 20
    assert np.ptp(shrink(False)) > 150


def test_images_of_several_sizes_make_one_batch(read, file, form, input_spec):
    resize = Resize(size=16, interpolation="bilinear", antialias=True, crop=None)
    images = [Image.new("RGB", size, (v, v, v)) for v, size in enumerate([(1, 1), (40, 30), (16, 16), (500, 2)])]
    body, content_type = form([file(image) for image in images])
    result = read(body, content_type, input_spec(height=16, width=16, resize=resize))
    np.testing.assert_array_equal(result, np.broadcast_to(np.arange(4).reshape(4, 1, 1, 1), (4, 3, 16, 16)))
