from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from acclimate_adapters import FrozenModel, Source
from acclimate_adapters.methods.atp import adapt
from acclimate_adapters.network.direction import direction
from acclimate_bench.budget.command import FROZEN, Portion, measure
from acclimate_bench.budget.resnet import CORRUPTED, Recipe, learned, network_input, teach, train, unseen
from acclimate_bench.data.shift import Shift
from acclimate_bench.errors import BenchError
from acclimate_store import Catalogue

Few = Callable[..., Shift]
Command = Callable[..., int]
BRIEF = Recipe(steps=2, rows=8, teachers=1, rounds=1, rates_lr=0.1)


def silent(_: str) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def briefly_trained(few: Few) -> nn.Module:
    """A network that is not changed."""
    shift = few("label", 0)
    return train(shift.images[0, :60], shift.labels[0, :60], Recipe(steps=30, rows=20, lr=0.005), silent)


@pytest.fixture
def two(few: Few) -> Callable[[str], Shift]:
    """Two clients of a shift, two batches each."""

    def cut(name: str) -> Shift:
        shift = few(name, 0, 3)
        return replace(shift, images=shift.images[:, :40], labels=shift.labels[:, :40])

    return cut


def test_who_taught_the_rates_is_not_evaluated(two: Callable[[str], Shift]) -> None:
    given = two("feature")
    (shift,) = learned(two("label"), [given], None, BRIEF)
    assert shift.clients == given.clients[1:]
    assert (shift.images == given.images[1:]).all()
    assert shift.x(0).shape == (40, 3, 32, 32)
    assert all(shift.model.source.rates[name] != 0 for name in shift.model.modules)
    exact, eighth, frozen = measure(shift, (0.125, FROZEN), silent)
    assert 40e6 < exact.nbytes < 50e6
    assert 0.1 < eighth.nbytes / exact.nbytes < 0.13
    assert frozen.nbytes == 0


@pytest.mark.slow
def test_a_kept_network_is_used_again_and_only_for_what_it_was_learned_from(
    two: Callable[[str], Shift], tmp_path: Path
) -> None:
    clean, corrupted = two("label"), [two("hybrid")]
    (first,) = learned(clean, corrupted, tmp_path, BRIEF)
    assert [str(key) for key in Catalogue(tmp_path).list()] == ["budget-resnet18/1"]
    written = (tmp_path / "budget-resnet18/1/manifest.json").stat().st_mtime_ns
    (again,) = learned(clean, corrupted, tmp_path, BRIEF)
    assert again.model.content_hash == first.model.content_hash
    assert (tmp_path / "budget-resnet18/1/manifest.json").stat().st_mtime_ns == written
    others: list[tuple[list[Shift], Recipe]] = [([two("feature")], BRIEF), (corrupted, replace(BRIEF, steps=3))]
    for shifts, recipe in others:
        with pytest.raises(BenchError, match=r"delete .*budget-resnet18, which was learned from other clients"):
            learned(clean, shifts, tmp_path, recipe)
    weights = tmp_path / "budget-resnet18/1/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(BenchError, match=r"delete .*budget-resnet18, which cannot be used: [^$]*model\.safetensors"):
        learned(clean, corrupted, tmp_path, BRIEF)


def test_clients_must_be_left_to_evaluate(few: Few) -> None:
    with pytest.raises(BenchError, match="feature has 2 clients; at least 3 are needed"):
        learned(few("label", 0), [few("feature", 0, 1)], None)


def test_images_that_others_have_too_train_nothing(few: Few) -> None:
    clean, corrupted = few("label", 0, 1), few("feature", 0)
    images = corrupted.images.copy()
    images[0, 7] = clean.images[1, 3]
    kept, labels = unseen(clean, [replace(corrupted, images=images)])
    whole = np.concatenate(clean.images)
    assert (kept == np.delete(whole, 203, axis=0)).all()
    assert (labels == np.delete(np.concatenate(clean.labels), 203)).all()


@pytest.mark.slow
def test_training_learns(few: Few, briefly_trained: nn.Module) -> None:
    shift = few("label", 0)
    with torch.no_grad():
        logits = briefly_trained(network_input(shift.images[0, :60]))
    assert (logits.argmax(1).numpy() == shift.labels[0, :60]).mean() > 0.6


def test_training_is_the_same_each_time(few: Few) -> None:
    shift = few("label", 0)
    once, twice = (train(shift.images[0], shift.labels[0], BRIEF, silent).state_dict() for _ in range(2))
    for name, tensor in once.items():
        torch.testing.assert_close(tensor, twice[name])


@pytest.mark.slow
def test_taught_rates_lower_the_loss_of_those_who_taught_them(few: Few, briefly_trained: nn.Module) -> None:
    shift = few("feature", 0)
    x, labels = network_input(shift.images[0, :20]), torch.from_numpy(shift.labels[0, :20])
    source = Source(prior=torch.full((10,), 0.1))
    model = FrozenModel.from_module(briefly_trained, classifier="fc", source=source)
    told: list[str] = []
    rates = teach(model, [(x, labels)], replace(BRIEF, rounds=2, rates_lr=0.01), told.append)
    adapted, _ = adapt(model, direction(model, x).tensors, rates)
    assert F.cross_entropy(model.forward(x, adapted), labels) < F.cross_entropy(model.frozen(x).logits, labels)
    assert told == ["rates"] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--network", "resnet18", "--shifts", "label"), "use feature, hybrid, multitype"),
        (("--keep", "store"), "use it with --network resnet18"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    bench: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench("budget", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_trained_resnet_18_loses_nothing_at_an_eighth_of_its_bytes(few: Few) -> None:
    rows = {name: few(name, 0, 1, 4, 5) for name in CORRUPTED}
    shifts = learned(few("label", *range(8)), [*rows.values()], None)
    found: list[tuple[Portion, ...]] = [tuple(measure(shift, (0.125, FROZEN), silent)) for shift in shifts]
    exact, eighth, frozen = (
        [sum(getattr(row[place], field) for row in found) / 3 for field in ("accuracy", "changed", "nbytes")]
        for place in range(3)
    )
    assert exact[0] - frozen[0] > 0.5
    assert frozen[1] > 5
    assert eighth[0] > exact[0] - 0.1
    assert eighth[2] < 0.13 * exact[2]
