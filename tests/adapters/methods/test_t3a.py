import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import ConfigurationError, FrozenModel, Source, StateMismatch, create
from acclimate_adapters.methods.t3a import add_supports


def linear_model(weight: Tensor, bias: Tensor | None = None) -> FrozenModel:
    """The classifier alone: the features are the input."""
    k, d = weight.shape
    head = nn.Linear(d, k, bias=bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            head.bias.copy_(bias)
    prior = torch.full((k,), 1 / k)
    return FrozenModel.from_module(nn.Sequential(head), classifier="0", source=Source(prior=prior))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def entropy_of(logits: list[float]) -> float:
    top = max(logits)
    norm = sum(math.exp(z - top) for z in logits)
    return -sum(math.exp(z - top) / norm * (z - top - math.log(norm)) for z in logits)


class Oracle:
    """Equations (1) to (4) in scalar loops, keeping every support for ever."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray, filter_k: int) -> None:
        self.weight, self.bias, self.filter_k = weight, bias, filter_k
        self.supports: list[list[tuple[float, np.ndarray]]] = [[] for _ in weight]
        self.add(weight)

    def add(self, features: np.ndarray) -> None:
        for f in features:
            rows = zip(self.weight, self.bias, strict=True)
            logits = [sum(a * b for a, b in zip(w, f, strict=True)) + c for w, c in rows]
            self.supports[int(np.argmax(logits))].append((entropy_of(logits), f))

    def scores(self, features: np.ndarray) -> np.ndarray:
        result = np.zeros((len(features), len(self.weight)))
        for k, supports in enumerate(self.supports):
            kept = sorted(supports, key=lambda support: support[0])[: self.filter_k]  # stable: the older first
            total = sum((z / math.sqrt(sum(v * v for v in z)) for _, z in kept), np.zeros(features.shape[1]))
            length = math.sqrt(sum(v * v for v in total)) or 1.0
            for i, f in enumerate(features):
                result[i, k] = sum(a * b / length for a, b in zip(f, total, strict=True))
        return result


@pytest.mark.parametrize("filter_k", [1, 3, 100])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equations_1_to_4_against_scalar_loops(filter_k: int, with_bias: bool) -> None:
    weight, bias = draw(4, 6), draw(4, seed=1) if with_bias else None
    model, adapter = linear_model(weight, bias), create("t3a", filter_k=filter_k)
    oracle = Oracle(weight.numpy(), bias.numpy() if bias is not None else np.zeros(4), filter_k)
    state = adapter.init(model)
    for k, size in enumerate((5, 1, 9, 5)):
        x = draw(size, 6, seed=10 + k)
        step = adapter.step(model, state, x)
        state = step.state
        oracle.add(x.numpy())
        np.testing.assert_allclose(step.logits.numpy(), oracle.scores(x.numpy()), rtol=0, atol=1e-12)


def test_before_the_first_batch_the_templates_are_the_directions_of_the_weights() -> None:
    weight = draw(4, 6, seed=2)
    assert (weight @ weight.T).argmax(1).tolist() == [0, 1, 2, 3]
    state = create("t3a").init(linear_model(weight))
    templates = nn.functional.normalize(state.tensors["supports"].sum(dim=1), dim=1)
    torch.testing.assert_close(templates, nn.functional.normalize(weight, dim=1))


def test_a_weight_row_that_another_class_wins_is_a_support_of_that_class() -> None:
    weight = torch.tensor([[1.0, 0.0], [3.0, 1.0], [0.0, -1.0]], dtype=torch.float64)  # row 0 scores higher in class 1
    model, adapter = linear_model(weight), create("t3a")
    assert adapter.init(model).tensors["counts"].tolist() == [0, 2, 1]
    step = adapter.step(model, adapter.init(model), torch.tensor([[1.0, 0.1]], dtype=torch.float64))
    assert step.signals["classes_without_support"] == 1
    assert float(step.logits[0, 0]) == 0
    assert bool(step.logits.isfinite().all())


def test_of_equal_entropies_the_older_support_stays() -> None:
    held = {
        "supports": torch.zeros(2, 2, 2),
        "entropies": torch.zeros(2, 2),
        "counts": torch.zeros(2, dtype=torch.int64),
    }
    logits = torch.tensor([[2.0, 0.0]] * 3)
    first = add_supports(held, torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]), logits)
    second = add_supports(first, torch.tensor([[0.0, -1.0]]), logits[:1])
    for new in (first, second):
        assert new["supports"][0].tolist() == [[1.0, 0.0], [0.0, 1.0]]
        assert new["counts"].tolist() == [2, 0]


def test_supports_stay_ordered_and_zero_where_vacant(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("t3a", filter_k=7)
    state = adapter.init(model)
    for batch in streams[0]:
        state = adapter.step(model, state, batch).state
    for k, count in enumerate(state.tensors["counts"].tolist()):
        supports, entropies = state.tensors["supports"][k], state.tensors["entropies"][k]
        assert all(a <= b for a, b in pairwise(entropies[:count].tolist()))
        assert not bool(supports[count:].any() | entropies[count:].any())


def test_the_state_never_changes_its_size(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("t3a", filter_k=5)
    state = adapter.init(model)
    size = state.nbytes
    assert size == 10 * 5 * 64 * 4 + 10 * 5 * 4 + 10 * 8
    for batch in streams[0]:
        state = adapter.step(model, state, batch).state
        assert state.nbytes == size


def test_two_classes_work() -> None:
    model, adapter = linear_model(draw(2, 3)), create("t3a", filter_k=2)
    step = adapter.step(model, adapter.init(model), draw(9, 3, seed=1))
    assert step.logits.shape == (9, 2)
    assert step.signals["supports"] == 4


def test_a_zero_feature_scores_zero_and_leaves_the_state_finite() -> None:
    model, adapter = linear_model(draw(3, 4)), create("t3a")
    step = adapter.step(model, adapter.init(model), torch.zeros(2, 4, dtype=torch.float64))
    assert torch.equal(step.logits, torch.zeros(2, 3, dtype=torch.float64))
    assert all(bool(t.isfinite().all()) for t in step.state.tensors.values())


def test_constant_images_are_answered(model: FrozenModel) -> None:
    adapter = create("t3a")
    step = adapter.step(model, adapter.init(model), torch.full((20, 1, 28, 28), 0.5))
    assert bool(step.logits.isfinite().all())


def test_a_state_of_another_filter_is_refused(model: FrozenModel, streams: Tensor) -> None:
    with pytest.raises(StateMismatch, match="filter_k=5"):
        create("t3a", filter_k=5).step(model, create("t3a").init(model), streams[0, 0])


@pytest.mark.parametrize("bad", [-1, 101, 2.5])
def test_a_filter_out_of_range_is_refused(bad: float) -> None:
    with pytest.raises(ConfigurationError, match="filter_k"):
        create("t3a", filter_k=bad)


def test_without_a_filter_the_state_stays_small_and_the_answer_is_that_of_all_supports(
    model: FrozenModel, streams: Tensor
) -> None:
    """100 supports per class keep everything of 60 rows, where none can be dropped."""
    everything, sums = create("t3a", filter_k=100), create("t3a", filter_k=0)
    one, other = everything.init(model), sums.init(model)
    size = other.nbytes
    for x in streams[0, :3]:
        kept, summed = everything.step(model, one, x), sums.step(model, other, x)
        torch.testing.assert_close(summed.logits, kept.logits, rtol=1e-4, atol=1e-4)
        assert summed.signals["supports"] == kept.signals["supports"]
        one, other = kept.state, summed.state
    assert other.nbytes == size
    with pytest.raises(StateMismatch, match="filter_k=0"):
        sums.step(model, one, streams[0, 0])
