"""What bad pictures cost the clients of every method that carries something along: real pictures and network."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from acclimate_adapters import FrozenModel, State, create, guarded_step
from acclimate_adapters.registry import ADAPTERS
from acclimate_store import Bundle
from acclimate_store.bundle import load_bundle

pytestmark = pytest.mark.slow  # accuracies over hundreds of batches

BUNDLE = Path(__file__).parents[2] / "model_store/bundles/fashion-cnn/1"
CLIENTS = range(0, 8, 2)
ENROLLED = ("fedthe", "fedthe_plus")
METHODS: Mapping[str, Mapping[str, Any]] = {
    "atp": {},
    "dynfed": {},
    "tent": {},
    "shot": {},
    "t3a": {},
    "fedthe": {},
    "fedthe_plus": {"views": 2, "tuning_steps": 1},
    "fed_ade": {},
    "fedcal": {},
    "balanced": {},
    "consensus": {},
    "atp+fedcal": {"fedcal": {"estimator": "em"}},
}
Labelled: TypeAlias = Callable[[int, int], tuple[NDArray[np.uint8], NDArray[np.int64]]]


@pytest.fixture(scope="module")
def bundle(model: FrozenModel) -> Bundle:
    """As it is delivered, with anchors, which `fed_ade` needs."""
    return replace(load_bundle(BUNDLE), model=model)


class Client:
    """A recorded client of a method that has seen its first 100 pictures in batches of 20."""

    def __init__(self, bundle: Bundle, name: str, labelled: Labelled, client: int, influence: float) -> None:
        self.adapter, self.model, self.influence = create(name, **METHODS[name]), bundle.model, influence
        images, self.labels = labelled(client, 200)
        self.x = bundle.prepare(images)
        enrolment = {"x": self.x[:100], "labels": torch.from_numpy(self.labels[:100])} if name in ENROLLED else {}
        self.state, _ = self.follow(self.adapter.init(self.model, **enrolment), self.x[:100].split(20))

    def follow(self, state: State, batches: Sequence[Tensor]) -> tuple[State, Tensor]:
        """The state after some batches, and their predicted classes."""
        predicted = []
        for x in batches:
            step = guarded_step(self.adapter, self.model, state, x, self.influence)
            state = step.state
            predicted.append(step.logits.argmax(-1))
        return state, torch.cat(predicted)

    def accuracy_after(self, *bad: Tensor) -> float:
        """Per cent of the next 100 pictures that are recognised, if some bad batches come before them."""
        state = self.follow(self.state, bad)[0] if bad else self.state
        _, predicted = self.follow(state, self.x[100:].split(20))
        return 100 * float(np.mean(predicted.numpy() == self.labels[100:]))


def noises(bundle: Bundle) -> dict[str, Tensor]:
    """256 images of pixels that are uniform, and as many that are normal."""
    pixels = np.random.default_rng(0).integers(0, 256, (256, 1, 28, 28), dtype=np.uint8)
    normal = torch.randn(256, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    return {"uniform": bundle.prepare(pixels), "normal": normal}


def test_every_method_that_carries_something_along_is_tried(bundle: Bundle, labelled: Labelled) -> None:
    x = bundle.prepare(labelled(0, 20)[0])
    states = {name: create(name).step(bundle.model, create(name).init(bundle.model), x).state for name in ADAPTERS}
    carrying = {name for name, state in states.items() if state.tensors} | set(ENROLLED)
    assert carrying - {"portfolio"} <= METHODS.keys()  # which asks others, each bounded as alone


@pytest.mark.parametrize("name", METHODS)
def test_a_hundred_batches_of_a_covered_camera_cost_nothing(name: str, bundle: Bundle, labelled: Labelled) -> None:
    black = bundle.prepare(np.random.default_rng(0).integers(0, 2, (20, 1, 28, 28), dtype=np.uint8))
    for client in (0, 5):
        one = Client(bundle, name, labelled, client, influence=0.0)
        state, _ = one.follow(one.state, [black] * 100)
        assert state is one.state
        assert one.accuracy_after(black) == one.accuracy_after()


@pytest.mark.parametrize("name", METHODS)
def test_256_noise_images_cost_no_method_more_than_2_points(name: str, bundle: Bundle, labelled: Labelled) -> None:
    clients = [Client(bundle, name, labelled, client, influence=1.0) for client in CLIENTS]
    good = np.mean([client.accuracy_after() for client in clients])
    for kind, noise in noises(bundle).items():
        for batches in ([noise], noise.split(8)):
            accuracy = np.mean([client.accuracy_after(*batches) for client in clients])
            assert accuracy >= good - 2, f"{kind} noise in {len(batches)} batches"


def test_a_bound_costs_ordinary_batches_nothing_and_without_it_noise_costs_much(
    bundle: Bundle, labelled: Labelled
) -> None:
    bounded, free = (
        [Client(bundle, "balanced", labelled, client, influence) for client in CLIENTS] for influence in (1.0, 0.0)
    )
    good = [client.accuracy_after() for client in free]
    assert [client.accuracy_after() for client in bounded] == good
    noise = noises(bundle)["normal"]
    assert np.mean([client.accuracy_after(noise) for client in free]) < np.mean(good) - 5
