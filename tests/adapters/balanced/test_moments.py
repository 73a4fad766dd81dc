"""Moments by class at the source: how they are measured, added up, and what is derived of them."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import (
    ConfigurationError,
    FrozenModel,
    InputError,
    MissingSource,
    Source,
    create,
)
from acclimate_adapters.balanced.moments import (
    MomentSums,
    SourceMoments,
    moment_sums,
    moments_from_sums,
    row_moments,
    source_moments,
)

Rows = Callable[..., tuple[Tensor, Tensor]]
Models = Callable[..., FrozenModel]
Nets = Callable[..., nn.Sequential]
PRIOR = [0.5, 0.3, 0.2]


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_moments_of_a_row_are_means_over_space() -> None:
    x = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, b = row_moments(x)
    for i in range(3):
        for c in range(2):
            pixels = [float(v) for v in x[i, c].flatten()]
            assert float(a[i, c]) == pytest.approx(sum(pixels) / 20, abs=1e-12)
            assert float(b[i, c]) == pytest.approx(sum(v * v for v in pixels) / 20, abs=1e-12)
    assert torch.equal(row_moments(x[:, :, 0, 0])[1], x[:, :, 0, 0].square())


def test_moments_of_half_precision_do_not_overflow() -> None:
    assert row_moments(torch.full((1, 1, 2, 2), 300.0, dtype=torch.float16))[1].item() == pytest.approx(90_000)
    assert row_moments(torch.full((1, 1), 300.0, dtype=torch.float16))[1].item() == pytest.approx(90_000)


def test_what_is_derived_at_each_layer_against_its_definition(small_model: Models) -> None:
    model = small_model()
    source, moments, prior = SourceMoments.of(model), model.source.moments, double(*PRIOR)
    for (name, layer), eta in zip(source.layers.items(), source.eta, strict=True):
        first, second = (prior @ moments[f"{name}.{kind}"].double() for kind in ("class_mean", "class_square"))
        variance = second - first.square() + 1e-12
        running = model.tensor(f"{name}.running_var")
        torch.testing.assert_close(layer.mean, first, rtol=1e-12, atol=0)
        torch.testing.assert_close(layer.precision, 1 / (len(first) * variance), rtol=1e-12, atol=0)
        torch.testing.assert_close(layer.ratio, running / variance, rtol=1e-12, atol=0)
        torch.testing.assert_close(eta, (moments[f"{name}.row_var"].double() / variance).mean(), rtol=1e-12, atol=0)
        assert torch.equal(layer.running_var, running)
        assert torch.equal(layer.running_mean, model.tensor(f"{name}.running_mean"))


def test_source_moments_against_scalar_loops(small_rows: Rows, small_model: Models) -> None:
    model = small_model()
    (rows, labels), ps = small_rows(33, seed=2), PRIOR
    moments = source_moments(model, [(rows[:20], labels[:20]), (rows[20:], labels[20:])])
    assert {name: tuple(t.shape) for name, t in moments.items()} == {
        **{f"bn1.{kind}": shape for kind, shape in shapes(3, 2).items()},
        **{f"bn2.{kind}": shape for kind, shape in shapes(3, 5).items()},
    }
    for c in range(2):
        omega = 0.0
        for k in range(3):
            a = [float(rows[i, c].mean()) for i in range(33) if labels[i] == k]
            b = [float(rows[i, c].square().mean()) for i in range(33) if labels[i] == k]
            mean = sum(a) / len(a)
            assert float(moments["bn1.class_mean"][k, c]) == pytest.approx(mean, abs=1e-6)
            assert float(moments["bn1.class_square"][k, c]) == pytest.approx(sum(b) / len(b), abs=1e-6)
            omega += ps[k] * (sum(v * v for v in a) / len(a) - mean**2)
        assert float(moments["bn1.row_var"][c]) == pytest.approx(omega, abs=1e-6)


def shapes(classes: int, width: int) -> Mapping[str, tuple[int, ...]]:
    return {"class_mean": (classes, width), "class_square": (classes, width), "row_var": (width,)}


def test_deeper_layers_are_measured_behind_the_running_statistics(
    small_net: Nets, small_rows: Rows, small_model: Models
) -> None:
    model, (rows, labels) = small_model(), small_rows(30, seed=2)
    seen = torch.nn.Sequential(*list(small_net())[:4])(rows)
    measured = source_moments(model, [(rows, labels)])["bn2.class_mean"]
    torch.testing.assert_close(measured[1].double(), seen[labels == 1].mean(0).detach(), rtol=0, atol=1e-6)


def test_sums_of_two_clients_add_up_to_those_of_both(small_rows: Rows, small_model: Models) -> None:
    model, (rows, labels) = small_model(), small_rows(30, seed=2)
    parts = [moment_sums(model, [(rows[half], labels[half])]) for half in (slice(0, 13), slice(13, 30))]
    added = MomentSums(
        sum(part.rows for part in parts),  # type: ignore[arg-type]
        {layer: parts[0].layers[layer] + parts[1].layers[layer] for layer in parts[0].layers},
    )
    together, whole = moments_from_sums(added, torch.tensor(PRIOR)), source_moments(model, [(rows, labels)])
    for name, moment in whole.items():
        torch.testing.assert_close(together[name], moment, rtol=0, atol=1e-6)


def test_a_class_without_rows_has_no_moments(small_rows: Rows, small_model: Models) -> None:
    rows, labels = small_rows(30)
    with pytest.raises(ConfigurationError, match=r"none of class \[2\]"):
        source_moments(small_model(), [(rows[labels < 2], labels[labels < 2])])


@pytest.mark.parametrize(
    "labels", [torch.tensor([0, 1, 3]), torch.tensor([0, -1, 1]), torch.tensor([0, 1]), torch.tensor([0.0, 1.0, 2.0])]
)
def test_labels_that_do_not_fit_are_refused(labels: Tensor, small_rows: Rows, small_model: Models) -> None:
    with pytest.raises(InputError, match="labels are needed, int64, from 0 to 2"):
        moment_sums(small_model(), [(small_rows(3)[0], labels)])


def test_moments_of_some_layers_or_another_width_are_refused(small_net: Nets, small_model: Models) -> None:
    moments = dict(small_model().source.moments)
    wrong = moments.pop("bn2.row_var")
    source = Source(prior=torch.tensor(PRIOR), moments=moments)
    with pytest.raises(MissingSource, match=r"bn2\.row_var is missing"):
        create("balanced").init(FrozenModel.from_module(small_net(), classifier="head", source=source))
    with pytest.raises(ConfigurationError, match=r"bn2\.row_var of shape \[4\], the network needs \[5\]"):
        create("balanced").init(small_model(**{"bn2.row_var": wrong[:4]}))
