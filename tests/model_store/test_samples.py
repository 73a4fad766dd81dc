from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acclimate_store import SampleError, load_streams


@pytest.fixture
def arrays() -> dict[str, Any]:
    return {
        "client_ids": np.array(["a", "b"]),
        "images": np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 1, 2, 2),
        "labels": np.array([[0, 1, 2], [2, 1, 0]]),
        "corruption": np.array(["fog", "none"]),
        "severity": np.array([3, 0]),
    }


def test_streams_come_back_client_by_client(tmp_path: Path, arrays: dict[str, Any]) -> None:
    np.savez_compressed(tmp_path / "streams.npz", **arrays)
    first, second = load_streams(tmp_path / "streams.npz")
    assert (first.client_id, first.corruption, first.severity) == ("a", "fog", 3)
    np.testing.assert_array_equal(second.images, arrays["images"][1])
    np.testing.assert_array_equal(second.labels, [2, 1, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "array labels is missing"),
        ({"labels": np.zeros((2, 4), dtype=np.int64)}, "every image one label"),
        ({"client_ids": np.array(["a"])}, "every client needs one id"),
        ({"images": np.zeros((2, 3, 2, 2), dtype=np.uint8)}, "images needs 5 dimensions, not 4"),
        ({"images": np.zeros((2, 3, 1, 2, 2), dtype=np.float32)}, "images must be uint8"),
        ({"severity": np.array([[3, 0]])}, "severity needs 1 dimensions"),
        ({"severity": np.array(3)}, "severity needs 1 dimensions, not 0"),
        ({"labels": np.array([[0, 1, None], [0, 1, 2]], dtype=object)}, "without pickle"),
    ],
)
def test_other_files_are_refused(changes: dict[str, Any], message: str, tmp_path: Path, arrays: dict[str, Any]) -> None:
    np.savez(tmp_path / "x.npz", **{name: value for name, value in (arrays | changes).items() if value is not None})
    with pytest.raises(SampleError, match=message):
        load_streams(tmp_path / "x.npz")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04junk", b"\x80\x04N."])
def test_what_is_no_npz_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(SampleError, match="cannot be read"):
        load_streams(tmp_path / "x.npz")


def test_a_bare_npy_file_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(SampleError, match="cannot be read"):
        load_streams(tmp_path / "x.npy")


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="cannot be read"):
        load_streams(tmp_path / "absent.npz")
