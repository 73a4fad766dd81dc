from collections.abc import Callable
from typing import Any

import torch

from acclimate_adapters import FrozenModel
from acclimate_adapters.methods.atp import adapt
from acclimate_adapters.methods.atp_training import refine
from acclimate_adapters.network.direction import direction


def test_learning_lowers_the_loss_after_adaptation(
    make_model: Callable[..., FrozenModel], source_quantities: dict[str, Any]
) -> None:
    model = make_model(rates=None)
    x, labels = source_quantities["anchors"]

    def loss(rates: dict[str, float]) -> float:
        adapted, _ = adapt(model, direction(model, x).tensors, rates)
        return float(torch.nn.functional.cross_entropy(model.forward(x, adapted), labels))

    rates = dict.fromkeys(model.modules, 0.0)
    before = loss(rates)
    for _ in range(5):
        rates = refine(model, rates, x, labels, 0.1)
    assert loss(rates) < before
