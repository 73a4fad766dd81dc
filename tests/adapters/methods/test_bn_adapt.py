import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import ConfigurationError, FrozenModel, MissingSource, Source, create, require
from acclimate_adapters.methods.bn_adapt import source_weight

SOURCE = Source(prior=torch.tensor([0.5, 0.5]))


def one_layer(norm: nn.Module, width: int) -> FrozenModel:
    """BatchNorm and then the classifier, whose features are therefore the normalised values."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.running_mean is not None:
        norm.running_mean.copy_(torch.randn(norm.num_features, generator=generator))
        norm.running_var.copy_(torch.rand(norm.num_features, generator=generator) + 0.5)
    net = nn.Sequential(norm, nn.Flatten(), nn.Linear(width, 2)).double()
    return FrozenModel.from_module(net, classifier="2", source=SOURCE)


def blend_oracle(x: np.ndarray, mean_s: np.ndarray, variance_s: np.ndarray, prior: float) -> np.ndarray:
    """Equations (1) to (3) in scalar loops."""
    n, channels = x.shape[:2]
    p = prior / (prior + n)
    out = np.empty_like(x)
    for c in range(channels):
        values = [float(v) for v in x[:, c].reshape(-1)]
        mean_t = sum(values) / len(values)
        variance_t = sum((v - mean_t) ** 2 for v in values) / (len(values) - 1)
        mean, variance = p * mean_s[c] + (1 - p) * mean_t, p * variance_s[c] + (1 - p) * variance_t
        for index in np.ndindex(x[:, c].shape):
            out[(index[0], c, *index[1:])] = (x[(index[0], c, *index[1:])] - mean) / math.sqrt(variance + 1e-5)
    return out


@pytest.mark.parametrize("prior", [0.0, 3.5, 16.0])
@pytest.mark.parametrize("n", [1, 3, 20])
def test_equations_1_to_3_against_scalar_loops(prior: float, n: int) -> None:
    model = one_layer(nn.BatchNorm2d(3), width=12)
    x = torch.randn(n, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    adapter = create("bn_adapt", prior_strength=prior)
    features = adapter.step(model, adapter.init(model), x).features
    mean, variance = (model.tensor(f"0.{kind}").numpy() for kind in ("running_mean", "running_var"))
    assert features is not None
    np.testing.assert_allclose(
        features.numpy().reshape(x.shape), blend_oracle(x.numpy(), mean, variance, prior), rtol=1e-12
    )


@pytest.mark.parametrize(("n", "expected"), [(1, 0.941), (7, 0.696), (20, 0.444), (64, 0.20)])
def test_a_short_batch_counts_with_its_real_size(n: int, expected: float) -> None:
    assert source_weight(16, n) == pytest.approx(expected, abs=5e-4)


def test_without_prior_strength_the_batch_alone_counts(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("bn_adapt", prior_strength=0)
    step = adapter.step(model, adapter.init(model), streams[0, 0])
    assert step.signals["source_weight"] == 0
    assert not torch.allclose(step.logits, model.frozen(streams[0, 0]).logits, atol=0.1)


def test_deeper_layers_see_adapted_activations() -> None:
    model = one_layer(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3)), width=12)
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 + 1
    expected = x.numpy()
    for _ in range(2):
        expected = blend_oracle(expected, np.zeros(3), np.ones(3), 16.0)
    adapter = create("bn_adapt", prior_strength=16)
    features = adapter.step(model, adapter.init(model), x).features
    assert features is not None
    np.testing.assert_allclose(features.numpy().reshape(x.shape), expected, rtol=1e-12)


def test_one_value_per_channel_keeps_the_running_statistics() -> None:
    for norm, shape in ((nn.BatchNorm1d(4), (1, 4)), (nn.BatchNorm2d(4), (1, 4, 1, 1))):
        model = one_layer(norm, width=4)
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        adapter = create("bn_adapt", prior_strength=2)
        step = adapter.step(model, adapter.init(model), x)
        assert torch.equal(step.logits, model.frozen(x).logits)
        assert step.signals["undefined_variances"] == 1


def test_one_image_with_a_map_adapts(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("bn_adapt")
    step = adapter.step(model, adapter.init(model), streams[0, 0, :1])
    assert step.signals["undefined_variances"] == 1  # the BatchNorm1d before the classifier
    assert not torch.equal(step.logits, model.frozen(streams[0, 0, :1]).logits)


@pytest.mark.parametrize("prior", [0.0, 16.0])
def test_constant_images_are_answered_and_reported(prior: float, model: FrozenModel) -> None:
    adapter = create("bn_adapt", prior_strength=prior)
    step = adapter.step(model, adapter.init(model), torch.full((20, 1, 28, 28), 0.5))
    assert bool(step.logits.isfinite().all())
    assert step.signals["constant_channels"] > 0


def test_a_layer_without_affine_parameters_adapts() -> None:
    model = one_layer(nn.BatchNorm2d(3, affine=False), width=12)
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    adapter = create("bn_adapt")
    assert not torch.equal(adapter.step(model, adapter.init(model), x).logits, model.frozen(x).logits)


@pytest.mark.parametrize("norm", [nn.GroupNorm(1, 3), nn.BatchNorm2d(3, track_running_stats=False)])
def test_a_network_without_adaptable_batch_norm_is_refused(norm: nn.Module) -> None:
    with pytest.raises(MissingSource, match="batch_norm"):
        require(create("bn_adapt"), one_layer(norm, width=12))


@pytest.mark.parametrize("bad", [-1.0, math.inf, math.nan])
def test_a_prior_strength_out_of_range_is_refused(bad: float) -> None:
    with pytest.raises(ConfigurationError, match="prior_strength"):
        create("bn_adapt", prior_strength=bad)


def test_dropout_stays_off(streams: Tensor) -> None:
    net = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(784, 2)).train()
    model = FrozenModel.from_module(net, classifier="3", source=SOURCE)
    adapter = create("bn_adapt")
    first, second = (adapter.step(model, adapter.init(model), streams[0, 0]).logits for _ in range(2))
    assert torch.equal(first, second)
