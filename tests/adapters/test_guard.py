from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from acclimate_adapters import FrozenModel, NumericalError, State, Step, create, guarded_step
from acclimate_adapters.guard import bounded, collapsed
from acclimate_adapters.state import Form


@dataclass(frozen=True)
class Broken:
    """An adapter whose step goes wrong in a chosen way."""

    spoil: Callable[[Step], Step]
    name: ClassVar[str] = "none"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset()

    def init(self, model: FrozenModel) -> State:
        return create("none").init(model)

    def form(self, model: FrozenModel, state: State) -> Mapping[str, Form]:
        return {}

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        return self.spoil(create("none").step(model, state, x))


def raise_numerical(step: Step) -> Step:
    raise NumericalError("the model answered with non-finite logits")


def spoil_state(step: Step) -> Step:
    return replace(step, state=replace(step.state, tensors={"t": torch.tensor([torch.nan])}))


def collapse(step: Step) -> Step:
    logits = torch.zeros_like(step.logits)
    rarest = step.logits.argmax(-1).bincount(minlength=logits.shape[1]).argmin()
    logits[:, rarest] = 20
    return replace(step, logits=logits)


def spoil_logits(step: Step) -> Step:
    logits = step.logits.clone()
    logits[3, 2] = torch.nan
    return replace(step, logits=logits)


@pytest.mark.parametrize("spoil", [raise_numerical, spoil_state, spoil_logits, collapse])
def test_step_that_went_wrong_answers_frozen_and_keeps_the_state(
    spoil: Callable[[Step], Step], model: FrozenModel, streams: Tensor
) -> None:
    adapter = Broken(spoil)
    state = adapter.init(model)
    step = guarded_step(adapter, model, state, streams[0, 0])
    assert step.state is state
    assert step.signals["fallback"] == 1
    assert torch.equal(step.logits, model.frozen(streams[0, 0]).logits)


def huge_state(step: Step) -> Step:
    return replace(step, state=replace(step.state, tensors={"t": torch.full((4,), 3e38), "u": torch.zeros(0)}))


def test_state_whose_sum_overflows_is_finite_all_the_same(model: FrozenModel, streams: Tensor) -> None:
    adapter = Broken(huge_state)
    step = guarded_step(adapter, model, adapter.init(model), streams[0, 0])
    assert step.signals["fallback"] == 0
    assert float(step.state.tensors["t"].max()) == pytest.approx(3e38)


def without_frozen_logits(step: Step) -> Step:
    return replace(collapse(step), frozen_logits=None)


def test_adapter_without_frozen_logits_is_judged_by_a_frozen_pass_of_its_own(
    model: FrozenModel, streams: Tensor
) -> None:
    adapter = Broken(without_frozen_logits)
    state = adapter.init(model)
    step = guarded_step(adapter, model, state, streams[0, 0])
    assert step.state is state
    assert step.signals["fallback"] == step.signals["collapsed"] == 1
    assert torch.equal(step.logits, model.frozen(streams[0, 0]).logits)


@pytest.mark.parametrize("name", ["bn_adapt", "fed_ade", "shot", "tent"])
def test_every_adapter_without_frozen_logits_passes_the_collapse_check_on_real_batches(
    name: str, model: FrozenModel, streams: Tensor
) -> None:
    adapter = create(name, **({"layers": "all"} if name == "fed_ade" else {}))
    plain = adapter.step(model, adapter.init(model), streams[0, 0])
    assert plain.frozen_logits is None
    step = guarded_step(adapter, model, adapter.init(model), streams[0, 0])
    assert step.signals["fallback"] == step.signals["collapsed"] == 0
    assert torch.equal(step.logits, plain.logits)


def test_tent_whose_layers_have_collapsed_answers_frozen(model: FrozenModel, streams: Tensor) -> None:
    adapter, frozen = create("tent"), model.frozen(streams[0, 0]).logits
    rarest = frozen.argmax(-1).bincount(minlength=10).argmin()
    towards = 50 * model.tensor("linear5.weight")[rarest]  # what bn4 adds to every feature, before a ReLU
    state = adapter.init(model)
    state = replace(state, tensors={**state.tensors, "bn4.bias": towards})
    assert adapter.step(model, state, streams[0, 0]).logits.argmax(-1).unique().tolist() == [int(rarest)]
    step = guarded_step(adapter, model, state, streams[0, 0])
    assert step.signals["fallback"] == step.signals["collapsed"] == 1
    assert step.state is state
    assert torch.equal(step.logits, frozen)


UNDECIDED = torch.tensor([[1.0, 0.8, 0.0]] * 9 + [[0.8, 1.0, 0.0]] * 11, dtype=torch.float64)  # class 1 by a hair
PAST = torch.tensor([[9.0, 0.0, 0.0]] * 100, dtype=torch.float64)  # a window of class 0


def test_all_predictions_of_one_class_by_a_prior_correction_are_counted_and_not_held_against_it(
    logit_model: Callable[..., FrozenModel],
) -> None:
    model, adapter = logit_model([1 / 3] * 3), create("fedcal")
    state = adapter.step(model, adapter.init(model), PAST).state
    step = guarded_step(adapter, model, state, UNDECIDED)
    assert step.logits.argmax(-1).unique().tolist() == [0]
    assert step.signals["collapsed"] == 1
    assert step.signals["fallback"] == 0
    assert step.state.step == state.step + 1
    for _ in range(5):  # the window heals by itself, for it took the batch in
        step = guarded_step(adapter, model, step.state, 4 * UNDECIDED)
    assert step.signals["collapsed"] == 0


def test_chain_is_judged_by_the_answer_of_its_weights(logit_model: Callable[..., FrozenModel]) -> None:
    model, adapter = logit_model([1 / 3] * 3, rates={}), create("atp+fedcal")
    state = adapter.step(model, adapter.init(model), PAST).state
    step = guarded_step(adapter, model, state, UNDECIDED)
    assert step.logits.argmax(-1).unique().tolist() == [0]
    assert step.signals["collapsed"] == 1
    assert step.signals["fallback"] == 0
    assert step.state.step == state.step + 1


def one_class(rows: int, k: int, logit: float = 9.0) -> Tensor:
    logits = torch.zeros(rows, 4)
    logits[:, k] = logit
    return logits


def test_small_batches_and_agreeing_models_are_no_collapse() -> None:
    disagreeing = one_class(8, 1, 2.0)
    assert collapsed(one_class(8, 0), disagreeing)
    assert not collapsed(one_class(7, 0), disagreeing[:7])
    assert not collapsed(one_class(8, 0), one_class(8, 0, 2.0))
    assert not collapsed(one_class(8, 0, 1.0), disagreeing)  # entropy did not fall
    mixed = one_class(8, 0)
    mixed[0] = one_class(1, 2)[0]
    assert not collapsed(mixed, disagreeing)


def test_a_module_moves_no_further_than_its_history_allows(model: FrozenModel, streams: Tensor) -> None:
    """By the formula: `influence` times the distance from the start, over the batches before."""
    adapter = create("atp")
    start, before = adapter.init(model), adapter.init(model)
    for x in streams[0, :3]:
        before = adapter.step(model, before, x).state
    after = adapter.step(model, before, 5 * torch.randn_like(streams[0, 3])).state
    capped = bounded(adapter, model, before, after, 20, 0.5)
    some = 0
    for name, tensor in after.tensors.items():
        most = 0.5 * float((before.tensors[name] - start.tensors[name]).norm()) / 3
        change, length = capped.tensors[name] - before.tensors[name], float((tensor - before.tensors[name]).norm())
        assert float(change.norm()) == pytest.approx(min(most, length), rel=1e-4, abs=1e-9)
        torch.testing.assert_close(change * length, (tensor - before.tensors[name]) * float(change.norm()))
        some += length > most
    assert some > 0
    assert capped.step == 4
    first = adapter.step(model, start, streams[0, 0]).state
    assert bounded(adapter, model, start, first, 20, 0.5) is first  # nothing to compare it with


@pytest.mark.parametrize("window", [30, 100, 400])
def test_a_bounded_window_takes_the_rows_of_a_mean_batch(window: int, model: FrozenModel, streams: Tensor) -> None:
    adapter, many = create("fedcal", window=window), streams[1].flatten(0, 1)
    state = adapter.init(model)
    for x in streams[0, :3]:
        state = adapter.step(model, state, x).state
    step = guarded_step(adapter, model, state, many, influence=1.0)
    held = int(step.state.tensors["rows"])
    assert held == 80  # 3 batches of 20, and 20 of the 120 rows
    expected = model.frozen(many).logits.log_softmax(-1)
    first = 0 if window > 120 else 120 - window  # of a large batch the window knows the last rows alone
    newest = step.state.tensors["log_posteriors"][torch.arange(60, 80) % window]
    torch.testing.assert_close(newest, expected[first : first + 20])
    ordinary, guarded = (guarded_step(adapter, model, state, streams[0, 3], influence=each) for each in (0.0, 1.0))
    assert guarded.state.to_bytes() == ordinary.state.to_bytes()


def test_balanced_counts_a_bounded_batch_for_as_many_rows_as_a_mean_one(model: FrozenModel, streams: Tensor) -> None:
    adapter, many = create("balanced", restart="off"), streams[0, 3:].flatten(0, 1)
    state = adapter.init(model)
    for x in streams[0, :3]:
        state = adapter.step(model, state, x).state
    step, free = (guarded_step(adapter, model, state, many, influence=each).state for each in (1.0, 0.0))
    assert float(step.tensors["rows"]) == 80
    before, whole = state.tensors["h0.posterior"], free.tensors["h0.posterior"]
    batch = before + (whole - before) * (60 + 60) / 60  # its mean posterior, at a weight of one half
    torch.testing.assert_close(step.tensors["h0.posterior"], (60 * before + 20 * batch) / 80, rtol=1e-4, atol=1e-6)
