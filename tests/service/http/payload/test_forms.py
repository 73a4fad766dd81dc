import numpy as np
import pytest

from acclimate_service.http.payload import PayloadLimits

FORM = "multipart/form-data; boundary=line"


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (3, 8, 6), dtype=np.uint8)


def test_files_become_images_in_order(read, file, form, grey, images):
    body, content_type = form([file(image) for image in images])
    np.testing.assert_array_equal(read(body, content_type, grey), images[:, None])


def test_field_names_part_types_and_further_headers_do_not_matter(read, file, grey, images):
    part = (
        b'--line\r\nX-Extra: 1\r\ncontent-disposition: form-data; filename="a;b.txt"; name=any\r\n'
        b"Content-Type: text/plain\r\n\r\n" + file(images[0]) + b"\r\n--line--"
    )
    np.testing.assert_array_equal(read(part, FORM, grey), images[:1, None])


def test_a_quoted_boundary_is_understood(read, file, form, grey, images):
    body, _ = form([file(images[0])])
    assert read(body, 'multipart/form-data; charset=utf-8; boundary="line"', grey).shape == (1, 1, 8, 6)


def test_file_contents_may_look_like_boundaries(refusal, form, grey):
    body, content_type = form([b"\r\n--lin\r\n--\r\n\r\r\n--lime"])
    error = refusal(body, content_type, grey)
    assert error.code == "undecodable_image"
    assert "0d 0a 2d 2d" in error.detail


def test_an_empty_form_is_an_empty_batch(refusal, form, grey):
    body, content_type = form([])
    assert refusal(body, content_type, grey).code == "empty_batch"


def test_an_empty_file_is_refused_with_its_index(refusal, file, form, grey, images):
    body, content_type = form([file(images[0]), b""])
    error = refusal(body, content_type, grey)
    assert error.code == "undecodable_image"
    assert "image 1" in error.detail
    assert "empty" in error.detail


def test_a_text_field_is_refused_by_name(refusal, grey):
    body = b'--line\r\nContent-Disposition: form-data; name="layout"\r\n\r\nNHWC\r\n--line--\r\n'
    error = refusal(body, FORM, grey)
    assert error.code == "invalid_request"
    assert "'layout'" in error.detail


def test_too_many_files_are_refused(refusal, form, grey):
    body, content_type = form([b"x"] * 5)
    assert refusal(body, content_type, grey, limits=PayloadLimits(max_images=4)).code == "too_many_images"


def test_a_form_without_boundary_is_malformed(refusal, form, grey):
    body, _ = form([b"x"])
    error = refusal(body, "multipart/form-data", grey)
    assert error.code == "malformed_body"
    assert "boundary" in error.detail


def test_a_form_that_is_cut_is_malformed(refusal, file, form, grey, images):
    body, content_type = form([file(images[0])])
    error = refusal(body[:-10], content_type, grey)
    assert error.code == "malformed_body"
    assert "closing boundary" in error.detail


@pytest.mark.parametrize(
    ("body", "boundary"),
    [(b"--other\r\n\r\n", "line"), (b"--line\r\nbad header\r\n\r\n", "line"), (b"", "line"), (b"--x", "x" * 300)],
    ids=["another boundary", "bad header", "empty", "long boundary"],
)
def test_a_malformed_form_is_refused(refusal, grey, body, boundary):
    assert refusal(body, f"multipart/form-data; boundary={boundary}", grey).code == "malformed_body"
