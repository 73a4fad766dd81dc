from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from acclimate_adapters import FrozenModel
from acclimate_adapters.atp_training import average, refine


def test_rates_of_three_clients_and_their_mean_are_those_of_the_authors_program(golden: ModuleType) -> None:
    folder = golden.Path(golden.__file__).parent / "A"
    recorded = np.load(folder / "expected/atp_train.npz")
    model = golden.load_model(folder, "rates.json", torch.float64)
    pixels = torch.from_numpy(recorded["images"])[:, :, None].float().div(255).sub(0.286).div(0.353)
    modules = [str(name) for name in recorded["modules"]]
    for start in ("zero", "half"):
        clients = []
        for c in range(3):
            rates = dict(zip(modules, recorded[f"start_{start}"].astype(float).tolist(), strict=True))
            for batch in (slice(0, 20), slice(20, 40)):
                labels = torch.from_numpy(recorded["labels"][c, batch])
                rates = refine(model, rates, pixels[c, batch].double(), labels, float(recorded["lr"]))
            assert [rates[m] for m in modules] == pytest.approx(recorded[f"after_{start}_f64"][c].tolist(), abs=1e-8)
            clients.append(rates)
        mean = average(clients)
        assert [mean[m] for m in modules] == pytest.approx(recorded[f"server_average_{start}_f64"].tolist(), abs=1e-8)


def test_learning_lowers_the_loss_after_adaptation(
    make_model: Callable[..., FrozenModel], source_quantities: dict[str, torch.Tensor]
) -> None:
    model = make_model(rates=None)
    x, labels = source_quantities["anchors"]

    def loss(rates: dict[str, float]) -> float:
        from acclimate_adapters.atp import adapt

        adapted, _ = adapt(model, model.direction(x).tensors, rates)
        return float(torch.nn.functional.cross_entropy(model.forward(x, adapted), labels))

    rates = dict.fromkeys(model.modules, 0.0)
    before = loss(rates)
    for _ in range(5):
        rates = refine(model, rates, x, labels, 0.1)
    assert loss(rates) < before
