"""The properties that `balanced` must have, and its edge cases."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from acclimate_adapters import (
    ConfigurationError,
    FrozenModel,
    MissingSource,
    NumericalError,
    Source,
    State,
    StateMismatch,
    Step,
    create,
    guarded_step,
    require,
)
from acclimate_adapters.balanced.client import HYPOTHESES, deviations_of
from acclimate_adapters.balanced.measures import style_distance
from acclimate_adapters.balanced.moments import SourceMoments
from acclimate_adapters.guard import bounded

Rows = Callable[..., tuple[Tensor, Tensor]]
Models = Callable[..., FrozenModel]
Follow = Callable[..., list[Step]]
Nets = Callable[..., nn.Sequential]
PRIOR = [0.5, 0.3, 0.2]


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def shifted_posteriors(n: int, prior: list[float], seed: int = 0) -> Tensor:
    """Logits [n, K] of posteriors that favour the first class."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, len(prior), generator=generator, dtype=torch.float64)
    logits[:, 0] += 1.5
    return logits


def test_without_batch_norm_the_prior_alone_is_corrected(logit_model: Models, follow: Follow) -> None:
    """Online MAP-EM (5) on the frozen posteriors, averaged with these by the gate (7)."""
    model, prior = logit_model(PRIOR), np.array(PRIOR)
    require(create("balanced"), model)
    batches = [shifted_posteriors(n, PRIOR, seed=n) for n in (1, 20, 30)]
    classes, n = np.zeros(3), 0
    for batch, step in zip(batches, follow("balanced", model, batches), strict=True):
        posterior, p = batch.softmax(-1).numpy(), (classes + 20 * prior) / (n + 20)
        for _ in range(5):
            r = posterior * p / prior
            p = (classes + (r / r.sum(1, keepdims=True)).sum(0) + 20 * prior) / (n + len(batch) + 20)
        r = posterior * p / prior
        r, n = r / r.sum(1, keepdims=True), n + len(batch)
        classes += r.sum(0)
        g = step.signals["label_shift"]
        np.testing.assert_allclose(step.logits.exp().numpy(), g * r + (1 - g) * posterior, rtol=0, atol=1e-12)
        assert step.signals["prior"] == pytest.approx(p.tolist(), abs=1e-12)
        assert step.signals["shrink"] == ()
        assert step.frozen_logits is not None
        assert torch.equal(step.frozen_logits, batch)
    assert "style_drift" not in step.signals
    assert step.state.nbytes == 8 * (1 + 2 * 3)


def test_group_norm_needs_no_moments(streams: Tensor, follow: Follow) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    model = FrozenModel.from_module(net, classifier="4", source=Source(prior=torch.tensor(PRIOR)))
    step = follow("balanced", model, [streams[0, 0], streams[0, 1]])[-1]
    torch.testing.assert_close(step.logits.exp().sum(-1), torch.ones(20))
    assert State.from_bytes(step.state.to_bytes()).tensors["h0.deviations"].shape == (2, 0)


def test_a_state_that_holds_the_moments_themselves_as_earlier_versions_wrote_them_goes_on(
    small_model: Models, small_rows: Rows, follow: Follow
) -> None:
    model, batches = small_model(), torch.split(small_rows(80)[0], 20)
    source, adapter = SourceMoments.of(model), create("balanced")
    *_, before, after = follow("balanced", model, batches)
    told = before.state.tensors
    moments = {f"{name}.moments": source.moments(told[deviations_of(name)]) for name in HYPOTHESES}
    kept = {name: tensor for name, tensor in told.items() if not name.endswith(".deviations")}
    earlier = replace(before.state, tensors=kept | moments)
    step = adapter.step(model, earlier, batches[-1])
    torch.testing.assert_close(step.logits, after.logits)
    assert step.state.tensors.keys() == told.keys()
    one, other = (bounded(adapter, model, state, step.state, 20, 0.1) for state in (earlier, before.state))
    for name in told:
        torch.testing.assert_close(one.tensors[name], other.tensors[name])


def test_a_batch_norm_without_running_statistics_stays_as_it_is(
    small_net: Nets, small_rows: Rows, small_model: Models, follow: Follow
) -> None:
    net = small_net()
    net.bn2 = nn.BatchNorm1d(5, track_running_stats=False).double()
    model = small_model(net)
    assert len(follow("balanced", model, [small_rows(20)[0]])[0].signals["shrink"]) == 1  # type: ignore[arg-type]


def test_order_of_the_rows_does_not_matter(small_rows: Rows, small_model: Models, follow: Follow) -> None:
    model, rows = small_model(), small_rows(60, seed=3)[0] * 1.3
    order = torch.randperm(20, generator=torch.Generator().manual_seed(4))
    plain = follow("balanced", model, list(rows.split(20)))
    permuted = follow("balanced", model, [batch[order] for batch in rows.split(20)])
    for a, b in zip(plain, permuted, strict=True):
        torch.testing.assert_close(a.logits[order], b.logits, rtol=0, atol=1e-12)
        for name, tensor in a.state.tensors.items():
            torch.testing.assert_close(tensor, b.state.tensors[name], rtol=0, atol=1e-12)


def test_names_of_the_classes_do_not_matter(
    small_net: Nets, small_rows: Rows, small_model: Models, follow: Follow
) -> None:
    model, rows, order = small_model(), small_rows(60, seed=3)[0] * 1.3, [2, 0, 1]
    net = small_net()
    net.head.weight.data, net.head.bias.data = net.head.weight[order], net.head.bias[order]
    moments = {n: t[order] if "class" in n else t for n, t in model.source.moments.items()}
    source = Source(prior=model.source.prior[order], moments=moments)
    relabelled = FrozenModel.from_module(net, classifier="head", source=source)
    for a, b in zip(
        follow("balanced", model, list(rows.split(20))),
        follow("balanced", relabelled, list(rows.split(20))),
        strict=True,
    ):
        torch.testing.assert_close(a.logits[:, order], b.logits, rtol=0, atol=1e-12)
        assert a.signals["label_shift"] == pytest.approx(b.signals["label_shift"], abs=1e-12)


def sound(steps: list[Step]) -> bool:
    return all(
        bool(step.logits.isfinite().all())
        and torch.allclose(step.logits.exp().sum(-1), torch.ones(len(step.logits), dtype=step.logits.dtype))
        and min(step.signals["prior"]) > 0  # type: ignore[type-var,arg-type]
        for step in steps
    )


def test_batches_of_one_also_into_batch_norm_over_vectors(model: FrozenModel, streams: Tensor, follow: Follow) -> None:
    steps = follow("balanced", model, [image for batch in streams[0, :1] for image in batch.split(1)])
    assert sound(steps)
    assert not torch.allclose(steps[-1].logits, model.frozen(streams[0, 0, -1:]).logits.log_softmax(-1), atol=1e-3)


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_identical_and_constant_images_are_answered(
    value: float, model: FrozenModel, streams: Tensor, follow: Follow
) -> None:
    assert sound(follow("balanced", model, [torch.full((20, 1, 28, 28), value)] * 3))
    assert sound(follow("balanced", model, [streams[2, 0, :1].expand(20, -1, -1, -1)] * 3))


def test_a_stream_of_one_class_keeps_the_others_possible(small_rows: Rows, small_model: Models, follow: Follow) -> None:
    rows, labels = small_rows(600, seed=6)
    steps = follow("balanced", small_model(), list(rows[labels == 1].split(20)))
    assert sound(steps)
    n = 200
    assert all(p >= 20 * ps / (n + 20) for p, ps in zip(steps[-1].signals["prior"], PRIOR, strict=True))  # type: ignore[arg-type]
    assert steps[-1].signals["label_shift"] > 0.99  # type: ignore[operator]


def test_two_classes(small_rows: Rows, small_model: Models, follow: Follow) -> None:
    assert sound(follow("balanced", small_model(prior=[0.7, 0.3]), list(small_rows(60, 2, seed=1)[0].split(20))))


def test_a_thousand_classes(logit_model: Models, follow: Follow) -> None:
    prior = [1e-3] * 1000
    steps = follow(
        "balanced", logit_model(prior, torch.float32), [shifted_posteriors(20, prior, seed=s).float() for s in (1, 2)]
    )
    assert sound(steps)


def test_a_dead_channel_changes_nothing(small_net: Nets, small_model: Models, follow: Follow, small_rows: Rows) -> None:
    net = small_net()
    net.linear.weight.data[2], net.linear.bias.data[2] = 0, 0.4
    for dtype in (torch.float64, torch.float32):
        model = small_model(net.to(dtype))
        steps = follow("balanced", model, [rows.to(dtype) for rows in (small_rows(80, seed=1)[0] * 1.3).split(20)])
        assert sound(steps)
        assert not any(step.signals["restarted"] for step in steps)
    assert style_distance(*map(np.array, ([1.0, 3.0], [1.0, 1.0], [0.0, 4.0]))) == 0.5


def test_values_beyond_single_precision_are_an_error_and_the_guard_answers_with_the_frozen_model(
    small_net: Nets, small_model: Models
) -> None:
    model = small_model(small_net(dtype=torch.float32))
    adapter, x = create("balanced"), torch.full((2, 2, 3, 3), 1e25)
    state = adapter.init(model)
    with pytest.raises(NumericalError):
        adapter.step(model, state, x)
    guarded = guarded_step(adapter, model, state, x)
    assert guarded.state is state
    assert guarded.signals["fallback"] == 1


def test_only_the_first_batch_of_a_changed_client_restarts(model: FrozenModel, streams: Tensor, follow: Follow) -> None:
    steps = follow("balanced", model, [*streams[0, :3], *streams[1, :3]])
    assert [step.signals["restarted"] for step in steps] == [0, 0, 0, 1, 0, 0]
    fresh = follow("balanced", model, list(streams[1, :3]))
    for a, b in zip(steps[3:], fresh, strict=True):
        assert torch.equal(a.logits, b.logits)
        assert all(torch.equal(a.state.tensors[name], tensor) for name, tensor in b.state.tensors.items())
    assert not any(
        s.signals["restarted"] for s in follow("balanced", model, [*streams[0, :3], *streams[1, :3]], restart="off")
    )


def test_a_state_that_says_nothing_of_its_rows_restarts(model: FrozenModel, streams: Tensor) -> None:
    """No step makes such a state, but it can be imported."""
    adapter = create("balanced")
    state = adapter.init(model)
    empty = replace(state, tensors={**state.tensors, "rows": torch.tensor(100.0, dtype=torch.float64)})
    step, fresh = (adapter.step(model, each, streams[0, 0]) for each in (empty, state))
    assert (step.signals["restarted"], step.signals["prediction_drift"]) == (1, 1)
    assert torch.equal(step.logits, fresh.logits)


def test_short_batches_and_short_histories_never_restart(model: FrozenModel, streams: Tensor, follow: Follow) -> None:
    assert not any(s.signals["restarted"] for s in follow("balanced", model, [streams[0, 0], *streams[1, 0].split(15)]))
    assert not any(s.signals["restarted"] for s in follow("balanced", model, [streams[0, 0, :15], streams[1, 0]]))
    assert "prediction_drift" not in follow("balanced", model, [streams[0, 0, :15], streams[1, 0]])[-1].signals


def test_without_memory_each_batch_is_the_first(model: FrozenModel, streams: Tensor, follow: Follow) -> None:
    for step, batch in zip(follow("balanced", model, list(streams[0, :3]), memory=0.0), streams[0, :3], strict=True):
        torch.testing.assert_close(step.logits, follow("balanced", model, [batch])[0].logits, rtol=0, atol=1e-6)


def test_state_keeps_its_size_and_stays_finite_over_500_batches(
    small_net: Nets, small_rows: Rows, small_model: Models, follow: Follow
) -> None:
    model = small_model(small_net(dtype=torch.float32))
    batches = list(small_rows(10_000, seed=8)[0].float().split(20))
    steps = follow("balanced", model, batches)
    channels, classes = 7, 3
    assert {step.state.nbytes for step in steps} == {8 + 4 * (4 * channels + 2 * classes)}
    assert steps[-1].state.nbytes == create("balanced").init(model).nbytes
    assert sound(steps[-1:])


def test_more_of_the_recorded_images_are_recognised_than_without(
    model: FrozenModel, streams: Tensor, follow: Follow
) -> None:
    labels = torch.from_numpy(np.load(Path(__file__).parents[2] / "golden/A/stream.npz")["labels"])
    hits = sum(
        int((step.logits.argmax(-1) == y).sum())
        for stream, truth in zip(streams, labels, strict=True)
        for step, y in zip(follow("balanced", model, list(stream)), truth, strict=True)
    )
    frozen = int((model.frozen(streams.flatten(0, 2)).logits.argmax(-1) == labels.flatten()).sum())
    assert (hits, frozen) == (320, 306)


def test_a_model_without_moments_is_refused(make_model: Models) -> None:
    model = make_model(moments={})
    with pytest.raises(MissingSource, match="moments"):
        require(create("balanced"), model)
    with pytest.raises(MissingSource, match="moments"):
        create("balanced").init(model)


def test_a_state_of_another_model_is_refused(small_rows: Rows, small_model: Models) -> None:
    state = create("balanced").init(small_model(prior=[0.2, 0.3, 0.5]))
    with pytest.raises(StateMismatch):
        create("balanced").step(small_model(), state, small_rows(3)[0])


@pytest.mark.parametrize(
    "bad",
    [
        {"memory": 1.1},
        {"memory": math.nan},
        {"restart": "maybe"},
        {"prior_rows": 0.0},
        {"em_steps": 0},
        {"gate_rows": 0},
    ],
    ids=str,
)
def test_hyperparameters_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(bad))):
        create("balanced", **bad)
