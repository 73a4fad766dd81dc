"""The benchmark of learned rates, on the carried clients."""

from pathlib import Path

import numpy as np
import pytest

from acclimate_bench.accuracy.rates import SIMULATED, Relearned, clean_images, draw, most_images, row
from acclimate_bench.cli import main
from acclimate_bench.data.fashion import CARRIED, FASHION, load_fashion
from acclimate_learning.clients import Pool, Population, simulate
from acclimate_learning.errors import LearningError
from acclimate_learning.rates import Learned


def made_up(shift: str) -> Relearned:
    rates = {"conv.weight": 0.1, "norm.weight": 0.0, "head.weight": -0.2, "norm.running_mean": 0.3}
    learned = Learned(rates, 0.3, {0: 0.5, 5: 0.4, 10: 0.45}, 10)
    accuracies = {"batch": 80.0, "online": 81.25}
    return Relearned(shift, learned, 77.0, accuracies, {mode: value - 0.5 for mode, value in accuracies.items()})


def test_what_teaches_is_sent_by_no_target_client_of_the_shift() -> None:
    assert {*SIMULATED} == {*FASHION}
    images = {}
    for name in ("label", "multitype", "feature"):
        shift = load_fashion(CARRIED, name)
        pool = clean_images(CARRIED, shift)
        sent = {image.tobytes() for client in shift.images for image in client}
        assert not sent & {image.tobytes() for image in pool.images}
        assert (pool.images.shape[1:], pool.images.dtype) == ((1, 28, 28), np.uint8)
        images[name] = len(pool.labels)
    assert images["label"] < images["multitype"] < images["feature"] == 2400


@pytest.mark.parametrize("fewest", [220, 223, 600])
def test_clients_that_tune_have_no_more_images_than_there_are_of_a_class(fewest: int) -> None:
    """Where label shift is measured, its own clean clients teach nobody."""
    labels = np.concatenate([np.full(fewest, 0), np.repeat(np.arange(1, 10), 800)])
    pool = Pool(np.zeros((len(labels), 1, 4, 4), np.uint8), labels)
    clients = simulate(pool, Population(shift="label", judge_images=most_images(pool)), "tune")
    assert len(clients[0].labels) > 0.4 * fewest
    with pytest.raises(LearningError):
        simulate(pool, Population(shift="label", judge_images=round(1.1 * most_images(pool)) + 2), "tune")


def test_a_line_has_both_modes_beside_what_is_recorded() -> None:
    assert row(made_up("feature")).split() == [
        *("feature", "77.00", "80.00", "79.50", "81.25", "80.75"),
        *("0.3", "10", "5"),
    ]


def test_the_picture_has_a_panel_for_each_shift_and_a_bar_for_each_module(tmp_path: Path) -> None:
    draw([made_up("label"), made_up("feature")], tmp_path / "rates.svg")
    text = (tmp_path / "rates.svg").read_text()
    for word in ("label", "feature", "norm.running_mean", "conv.weight", "BatchNorm statistics", "last layer"):
        assert f">{word}</text>" in text
    draw([made_up("label"), made_up("feature")], tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rates", "--data", str(tmp_path), "--shifts", "label"]) == 2
    assert "is no benchmark folder, it lacks accuracy.json" in capsys.readouterr().err
