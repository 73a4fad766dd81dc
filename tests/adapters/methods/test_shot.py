import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import FrozenModel, Source, create
from acclimate_adapters.methods.shot import negative_diversity, refined_labels, soft_labels
from acclimate_adapters.network.model import Pass

Array = np.ndarray


def random_batch(seed: int, b: int = 12, d: int = 4, k: int = 5, sharpness: float = 2.0) -> tuple[Tensor, Tensor]:
    """Features [b, d] and logits [b, k] that have something to do with each other."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(b, d, dtype=torch.float64, generator=generator)
    return features, sharpness * features @ torch.randn(d, k, dtype=torch.float64, generator=generator)


def refined_oracle(features: Array, p: Array) -> list[int]:
    """Equations 2 to 4 by the authors' rules, in scalar loops."""
    rows = [[*map(float, f), 1.0] for f in features]
    rows = [[v / math.sqrt(sum(u * u for u in row)) for v in row] for row in rows]
    weights, labels = [list(map(float, row)) for row in p], [int(np.argmax(row)) for row in p]
    for _ in range(2):
        distances: list[dict[int, float]] = [{} for _ in rows]
        for k in sorted(set(labels)):
            total = 1e-8 + sum(w[k] for w in weights)
            c = [sum(w[k] * row[j] for w, row in zip(weights, rows, strict=True)) / total for j in range(len(rows[0]))]
            for i, row in enumerate(rows):
                cosine = sum(a * b for a, b in zip(row, c, strict=True)) / math.sqrt(sum(v * v for v in c))
                distances[i][k] = 1 - cosine / math.sqrt(sum(v * v for v in row))
        labels = [min(d, key=d.__getitem__) for d in distances]
        weights = [[float(k == label) for k in range(p.shape[1])] for label in labels]
    return labels


def soft_oracle(features: Array, p: Array) -> list[int]:
    """Equations 2 and 3 with column-normalised predictions and Euclidean distances, in scalar loops."""
    (b, d), k = features.shape, p.shape[1]
    total = [sum(p[i, c] for i in range(b)) for c in range(k)]
    centroids = [[sum(p[i, c] / total[c] * features[i, j] for i in range(b)) for j in range(d)] for c in range(k)]
    return [
        min(range(k), key=lambda c: sum((features[i, j] - centroids[c][j]) ** 2 for j in range(d))) for i in range(b)
    ]


def test_equation_1_against_scalar_loops() -> None:
    _, logits = random_batch(0)
    p = [[math.exp(z) / sum(map(math.exp, row)) for z in row] for row in logits.tolist()]
    q = [sum(row[k] for row in p) / len(p) for k in range(5)]
    diversity = sum(v * math.log(v) for v in q)
    assert float(negative_diversity(logits)) == pytest.approx(diversity, abs=1e-7)
    entropy = -sum(v * math.log(v) for row in p for v in row) / len(p)
    loss = create("shot", beta=0).loss(Pass(torch.zeros(12, 1), logits))
    assert float(loss) == pytest.approx(entropy + diversity, abs=1e-7)


@pytest.mark.parametrize("seed", range(10))
def test_equations_2_to_4_by_the_authors_rules_against_scalar_loops(seed: int) -> None:
    features, logits = random_batch(seed, k=8)
    p = logits.softmax(1)
    assert refined_labels(features, p).tolist() == refined_oracle(features.numpy(), p.numpy())


@pytest.mark.parametrize("seed", range(10))
def test_equations_2_and_3_by_the_soft_rule_against_scalar_loops(seed: int) -> None:
    features, logits = random_batch(seed, sharpness=0.5)
    p = logits.softmax(1)
    assert soft_labels(features, p).tolist() == soft_oracle(features.numpy(), p.numpy())


def test_a_class_that_nobody_predicts_gets_no_refined_label() -> None:
    features, logits = random_batch(3)
    logits[:, 2] = logits.min() - 0.1
    assert 2 not in refined_labels(features, logits.softmax(1)).tolist()


def test_a_class_whose_probability_underflows_leaves_the_soft_rule_finite() -> None:
    features, logits = random_batch(4)
    logits[:, 1] = -1e4
    p = logits.softmax(1)
    assert float(p[:, 1].sum()) == 0
    assert soft_labels(features, p).shape == (12,)
    without = torch.tensor([0, 2, 3, 4])
    labels = soft_labels(features, p)
    nearest = without[soft_labels(features, p[:, without])]
    assert torch.equal(labels[labels != 1], nearest[labels != 1])


@pytest.mark.parametrize("centroids", ["refined", "soft"])
def test_equations_5_and_6_against_a_plain_optimizer(
    centroids: str, double_model: FrozenModel, network: nn.Module, streams: Tensor
) -> None:
    net = copy.deepcopy(network).double().train()
    head = net.get_submodule("linear5")
    optimizer = torch.optim.SGD([p for name, p in net.named_parameters() if "linear5" not in name], lr=0.02)
    adapter = create("shot", lr=0.02, beta=0.3, centroids=centroids)
    state = adapter.init(double_model)
    for batch in streams[0, :3].double():
        step = adapter.step(double_model, state, batch)
        state = step.state
        features = net[:-1](batch)
        logits = head(features)
        torch.testing.assert_close(step.logits, logits.detach(), rtol=0, atol=1e-9)
        p = logits.softmax(1)
        oracle = refined_oracle if centroids == "refined" else soft_oracle
        labels = torch.tensor(oracle(features.detach().numpy(), p.detach().numpy()))
        q = p.mean(0)
        loss = -(p * p.log()).sum(1).mean() + (q * q.log()).sum() + 0.3 * nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_with_step_size_0_it_is_plain_batch_normalisation(
    double_model: FrozenModel, network: nn.Module, streams: Tensor
) -> None:
    net, adapter = copy.deepcopy(network).double().train(), create("shot", lr=0)
    step = adapter.step(double_model, adapter.init(double_model), streams[0, 0].double())
    torch.testing.assert_close(step.logits, net(streams[0, 0].double()).detach(), rtol=0, atol=1e-10)


def test_a_batch_of_one_takes_no_step(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("shot", lr=0.1)
    first = adapter.step(model, adapter.init(model), streams[0, 0, :1])
    assert torch.equal(first.logits, model.frozen(streams[0, 0, :1]).logits)
    trained = adapter.step(model, first.state, streams[0, 0]).state
    after = adapter.step(model, trained, streams[0, 1, :1])
    assert after.state.step == 3
    assert all(torch.equal(after.state.tensors[name], tensor) for name, tensor in trained.tensors.items())
    assert not torch.equal(after.logits, model.frozen(streams[0, 1, :1]).logits)


def test_the_classifier_and_the_running_statistics_are_never_carried(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("shot", lr=0.1)
    state = adapter.step(model, adapter.init(model), streams[0, 0]).state
    expected = set(model.modules) - set(model.statistics) - {"linear5.weight", "linear5.bias"}
    assert state.tensors.keys() == expected
    assert all(not torch.equal(tensor, model.tensor(name)) for name, tensor in state.tensors.items())


@pytest.mark.parametrize("centroids", ["refined", "soft"])
def test_identical_images_are_answered(centroids: str, model: FrozenModel, streams: Tensor) -> None:
    adapter = create("shot", lr=0.01, centroids=centroids)
    state = adapter.init(model)
    for x in (streams[0, 0, :1].expand(20, -1, -1, -1), torch.full((20, 1, 28, 28), 0.5)):
        step = adapter.step(model, state, x)
        state = step.state
        assert bool(step.logits.isfinite().all())
        assert all(bool(tensor.isfinite().all()) for tensor in state.tensors.values())


def test_zero_features_have_a_refined_label() -> None:
    features, logits = torch.zeros(6, 4), torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    assert set(refined_labels(features, logits.softmax(1)).tolist()) <= set(logits.argmax(1).tolist())


def test_a_network_without_batch_norm_adapts(streams: Tensor) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 2))
    model = FrozenModel.from_module(net, classifier="3", source=Source(prior=torch.tensor([0.5, 0.5])))
    adapter = create("shot", lr=0.1)
    first = adapter.step(model, adapter.init(model), streams[0, 0])
    torch.testing.assert_close(first.logits, model.frozen(streams[0, 0]).logits)
    assert first.state.tensors.keys() == {"1.weight", "1.bias"}
