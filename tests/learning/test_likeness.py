"""Unlabelled images of the target side choose the corruptions of simulated clients, each among those of its role."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from acclimate_learning.clients import FAMILIES_OF, Images, Pool, Population, simulate
from acclimate_learning.corruptions import corrupt
from acclimate_learning.errors import LearningError
from acclimate_learning.likeness import families_like, read_unlabelled
from acclimate_store import Bundle

CLEAN = Path(__file__).parents[2] / "benchmarks/data/fashion/label/target.npz"


@pytest.fixture(scope="module")
def clean() -> Pool:
    with np.load(CLEAN) as arrays:
        return Pool(arrays["images"].reshape(-1, 1, 28, 28)[::5], arrays["labels"].reshape(-1)[::5])


def corrupted(pool: Pool, family: str) -> Images:
    """Other images of the same side: the corruption is drawn anew."""
    draw = torch.Generator().manual_seed(5)
    return corrupt(torch.from_numpy(pool.images[:100]), family, 4, draw).numpy()


@pytest.mark.parametrize(
    ("seen", "teaching", "absent"),
    [
        ("gaussian_blur", {"defocus_blur", "zoom_blur"}, {"gaussian_noise", "impulse_noise", "shot_noise"}),
        ("speckle_noise", {"shot_noise", "gaussian_noise"}, {"defocus_blur", "zoom_blur"}),
        ("fog", {"fog"}, set()),
    ],
)
def test_what_teaches_is_of_the_kind_that_was_seen(
    seen: str, teaching: set[str], absent: set[str], clean: Pool
) -> None:
    found = families_like(corrupted(clean, seen), clean, 0)
    assert teaching <= {*found["teach"]}
    assert not absent & {*found["teach"]}
    assert {role: len(families) for role, families in found.items()} == {"teach": 6, "tune": 8, "judge": 2}
    for role, families in FAMILIES_OF.items():
        assert {*found[role]} <= {*families}, "no role gets a corruption that it did not have"
        assert (seen in found[role]) == (seen in families)


def test_clients_have_the_corruptions_that_were_chosen(clean: Pool) -> None:
    families = {"teach": ("fog",), "tune": ("posterize",), "judge": ("gamma",)}
    population = Population(shift="feature", judges=2, judge_images=20, families=families)  # type: ignore[arg-type]
    assert {client.shift.split()[0] for client in simulate(clean, population, "judge")} == {"gamma"}


def test_image_files_are_read_wherever_they_lie_and_too_few_are_refused(
    clean: Pool, bundle: Bundle, tmp_path: Path
) -> None:
    for number, image in enumerate(clean.images[:24]):
        folder = tmp_path / f"camera-{number % 2}/day"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(folder / f"{number:02d}.png")
    (tmp_path / "notes.txt").write_text("no image")
    found = read_unlabelled(tmp_path, bundle.manifest.input)
    assert sorted(image.tobytes() for image in found) == sorted(image.tobytes() for image in clean.images[:24])
    with pytest.raises(LearningError, match=r"camera-0 holds 12 image files; at least 20 are needed"):
        read_unlabelled(tmp_path / "camera-0", bundle.manifest.input)
