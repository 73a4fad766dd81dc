"""`consensus` against its five members, each run by itself, and its own equations."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from acclimate_adapters import (
    ConfigurationError,
    FrozenModel,
    MissingSource,
    NumericalError,
    State,
    Step,
    create,
    guarded_step,
)
from acclimate_adapters.balanced.moments import SourceMoments
from acclimate_adapters.balanced.passes import Blending, Rows, TorchPasses
from acclimate_adapters.consensus import Consensus, consensus
from acclimate_adapters.guard import bounded

MEMBERS = {
    "none": create("none"),
    "bn_adapt": create("bn_adapt", prior_strength=16),
    "bn_adapt+em": create("bn_adapt+em", bn_adapt={"prior_strength": 16}, em={"steps": 2}),
    "t3a": create("t3a", filter_k=20),
    "balanced": create("balanced"),
}
Models = Callable[..., FrozenModel]
Nets = Callable[..., nn.Sequential]
RowsOf = Callable[..., tuple[Tensor, Tensor]]
SIZES = (20, 1, 7, 20)


class Told(NamedTuple):
    """What the members answer to a batch, and what is made of it; probabilities [B, K]."""

    members: dict[str, Step]
    answer: np.ndarray
    agreed: list[bool]


def softmax(logits: Tensor) -> np.ndarray:
    shifted = np.exp(logits.double().numpy() - logits.double().numpy().max(1, keepdims=True))
    return np.asarray(shifted / shifted.sum(1, keepdims=True))


def by_members(model: FrozenModel, batches: Sequence[Tensor]) -> list[Told]:
    """The definition, row by row, from five adapters that know nothing of each other."""
    states, told = {name: adapter.init(model) for name, adapter in MEMBERS.items()}, []
    for x in batches:
        steps = {name: adapter.step(model, states[name], x) for name, adapter in MEMBERS.items()}
        states = {name: step.state for name, step in steps.items()}
        p, answer, agreed = {name: softmax(step.logits) for name, step in steps.items()}, [], []
        for i in range(len(x)):
            agreed.append(p["t3a"][i].argmax() == p["none"][i].argmax())
            answer.append(p["none"][i] if agreed[-1] else sum(each[i] for each in p.values()) / 5)
        told.append(Told(steps, np.stack(answer), agreed))
    return told


def follow(model: FrozenModel, batches: Sequence[Tensor]) -> list[Step]:
    adapter, steps = create("consensus"), []
    state = adapter.init(model)
    for x in batches:
        steps.append(adapter.step(model, state, x))
        state = steps[-1].state
    return steps


@pytest.mark.parametrize("client", [0, 1, 2])
@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_it_answers_what_its_members_do_by_themselves(
    client: int,
    precision: torch.dtype,
    tolerance: float,
    model: FrozenModel,
    double_model: FrozenModel,
    streams: Tensor,
) -> None:
    used = model if precision == torch.float32 else double_model
    batches = [
        *streams[client].to(precision),
        streams[client, 0, :1].to(precision),
        streams[client, 1, :3].to(precision),
    ]
    told = by_members(used, batches)
    for expected, step in zip(told, follow(used, batches), strict=True):
        np.testing.assert_allclose(softmax(step.logits), expected.answer, rtol=0, atol=tolerance)
        assert step.signals["agreed"] == pytest.approx(np.mean(expected.agreed))
        assert step.signals["restarted"] == expected.members["balanced"].signals["restarted"]
        for name in ("balanced", "t3a"):
            for key, tensor in expected.members[name].state.tensors.items():
                torch.testing.assert_close(step.state.tensors[f"{name}.{key}"], tensor, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(step.frozen_logits, expected.members["none"].logits)
    assert {True, False} == {agreed for each in told for agreed in each.agreed}


def test_a_changed_client_restarts_as_balanced_does(double_model: FrozenModel, streams: Tensor) -> None:
    batches = [*streams[0, :2].double(), *streams[1, :2].double() * 3]
    told, steps = by_members(double_model, batches), follow(double_model, batches)
    assert 1 in [step.signals["restarted"] for step in steps]
    for expected, step in zip(told, steps, strict=True):
        np.testing.assert_allclose(softmax(step.logits), expected.answer, rtol=0, atol=1e-9)


def test_equations_1_and_2_row_by_row() -> None:
    frozen, other = np.array([[0.7, 0.3], [0.6, 0.4]]), np.array([[0.1, 0.9], [0.2, 0.8]])
    answer = np.exp(consensus(np.log(frozen), np.array([True, False]), np.log(frozen), np.log(other)))
    np.testing.assert_allclose(answer, [[0.7, 0.3], [0.4, 0.6]])


def test_a_class_that_nobody_believes_in_is_no_infinity() -> None:
    log_p = np.array([[0.0, -2000.0]])
    assert np.isfinite(consensus(log_p, np.array([False]), *[log_p] * 5)).all()


def test_before_the_prior_was_corrected_it_is_the_same_of_uncorrected_members(
    double_model: FrozenModel, streams: Tensor
) -> None:
    batches = list(streams[0].double())
    for expected, step in zip(by_members(double_model, batches), follow(double_model, batches), strict=True):
        none, bn, _, t3a, balanced = expected.members.values()
        assert balanced.uncorrected is not None
        assert step.uncorrected is not None
        mean = sum(map(softmax, (none.logits, bn.logits, bn.logits, t3a.logits, balanced.uncorrected))) / 5
        wanted = np.where(np.array(expected.agreed)[:, None], softmax(none.logits), mean)
        np.testing.assert_allclose(softmax(step.uncorrected), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_the_blended_pass_of_several_clients_is_bn_adapt_of_each(
    precision: torch.dtype, model: FrozenModel, double_model: FrozenModel, streams: Tensor
) -> None:
    used = model if precision == torch.float32 else double_model
    batches = [streams[c % 3, 0, :n].to(precision) for c, n in enumerate(SIZES)]
    source, adapter = SourceMoments.of(used), create("bn_adapt", prior_strength=16)
    run = TorchPasses(used, source)(Rows.of(batches, source.prior))
    blended = run.blended(Blending.of(batches, 16, source.prior))
    expected = [adapter.step(used, adapter.init(used), x).logits for x in batches]
    tolerance = 1e-10 if precision == torch.float64 else 1e-4
    torch.testing.assert_close(blended, torch.cat(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_clients_whose_rows_run_together_get_what_each_gets_alone(
    precision: torch.dtype, tolerance: float, model: FrozenModel, double_model: FrozenModel, streams: Tensor
) -> None:
    adapter, used = Consensus(), model if precision == torch.float32 else double_model
    states = [adapter.init(used) for _ in SIZES]
    for k in range(3):
        batches = [streams[c % 3, k, :n].to(precision) for c, n in enumerate(SIZES)]
        together = adapter.step_many(used, states, batches)
        apart = [adapter.step(used, state, x) for state, x in zip(states, batches, strict=True)]
        for one, other in zip(together, apart, strict=True):
            np.testing.assert_allclose(softmax(one.logits), softmax(other.logits), rtol=0, atol=tolerance)
            assert one.signals == pytest.approx(other.signals, abs=1e-4)
            for name, tensor in other.state.tensors.items():
                torch.testing.assert_close(one.state.tensors[name], tensor, rtol=1e-5, atol=tolerance)
        states = [step.state for step in apart]


class Counted(TorchFunctionMode):
    """Counts the convolutions that are really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.convolutions += func is torch.conv2d
        return func(*args, **(kwargs or {}))


def test_it_takes_four_passes_of_which_three_share_the_first_convolution(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("consensus")
    state = adapter.init(model)
    with Counted() as counted:
        adapter.step(model, state, streams[0, 0])
    assert counted.convolutions == 3 + 1 + 3 * 2  # of three layers; the frozen pass is one of its own


def test_each_member_is_bounded_in_its_own_way(model: FrozenModel, streams: Tensor) -> None:
    adapter, small = create("consensus"), streams[0, 0, :5]
    before = adapter.step(model, adapter.init(model), small).state
    after = adapter.step(model, before, streams[0, 1]).state
    kept = bounded(adapter, model, before, after, 20, 0.5)
    for name in ("balanced", "t3a"):
        member = create(name)
        parts = [
            State(
                name,
                member.layout,
                whole.model,
                whole.step,
                {
                    key.removeprefix(f"{name}."): tensor
                    for key, tensor in whole.tensors.items()
                    if key.startswith(f"{name}.")
                },
            )
            for whole in (before, after)
        ]
        for key, tensor in bounded(member, model, *parts, 20, 0.5).tensors.items():
            assert torch.equal(kept.tensors[f"{name}.{key}"], tensor)
    assert float(kept.tensors["balanced.rows"]) < float(after.tensors["balanced.rows"])


def test_models_without_batch_norm_or_moments_are_refused(
    small_net: Nets, logit_model: Models, make_model: Models
) -> None:
    with pytest.raises(MissingSource, match="batch_norm"):
        create("consensus").init(logit_model([0.5, 0.5]))
    with pytest.raises(MissingSource, match="moments"):
        create("consensus").init(make_model(moments={}))


def test_it_needs_what_any_of_its_members_needs() -> None:
    assert Consensus.needs == frozenset().union(*(member.needs for member in MEMBERS.values()))


def test_it_cannot_be_part_of_a_chain() -> None:
    for name in ("consensus+em", "consensus+fedcal"):
        with pytest.raises(ConfigurationError, match="no class prior can be corrected beside 'consensus'"):
            create(name)


def test_numbers_that_overflow_are_an_error_that_the_guard_answers_by_the_frozen_model(
    model: FrozenModel, streams: Tensor
) -> None:
    adapter, huge = create("consensus"), streams[0, 0] * 1e25
    state = adapter.init(model)
    with pytest.raises(NumericalError):
        Consensus().step_many(model, [state, state], [streams[0, 0], huge])
    step = guarded_step(adapter, model, state, huge)
    assert (step.signals["fallback"], step.state) == (1, state)


def test_a_prior_that_is_not_uniform_is_that_of_all_members(small_model: Models, small_rows: RowsOf) -> None:
    model = small_model(prior=(0.5, 0.3, 0.2))
    batches = [small_rows(n, seed=n)[0] * 1.5 for n in (20, 7)]
    for expected, step in zip(by_members(model, batches), follow(model, batches), strict=True):
        np.testing.assert_allclose(softmax(step.logits), expected.answer, rtol=0, atol=1e-9)
