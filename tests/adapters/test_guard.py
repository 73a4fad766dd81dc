from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from acclimate_adapters import FrozenModel, NumericalError, State, Step, create, guarded_step
from acclimate_adapters.guard import collapsed


@dataclass(frozen=True)
class Broken:
    """An adapter whose step goes wrong in a chosen way."""

    spoil: Callable[[Step], Step]
    name: ClassVar[str] = "none"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset()

    def init(self, model: FrozenModel) -> State:
        return create("none").init(model)

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


@pytest.mark.parametrize("spoil", [raise_numerical, spoil_state, collapse])
def test_step_that_went_wrong_answers_frozen_and_keeps_the_state(
    spoil: Callable[[Step], Step], model: FrozenModel, streams: Tensor
) -> None:
    adapter = Broken(spoil)
    state = adapter.init(model)
    step = guarded_step(adapter, model, state, streams[0, 0])
    assert step.state is state
    assert step.signals["fallback"] == 1
    assert torch.equal(step.logits, model.frozen(streams[0, 0]).logits)


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
