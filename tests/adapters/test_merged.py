"""Steps that are taken together are those that are taken alone, whoever else is in the batch."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from torch import Tensor, nn

from acclimate_adapters import (
    ADAPTERS,
    Adapter,
    FrozenModel,
    InputError,
    Source,
    State,
    StateMismatch,
    Step,
    create,
    guarded_step,
)
from acclimate_adapters.adapter import FrozenOnly
from acclimate_adapters.balanced.balanced import Balanced
from acclimate_adapters.balanced.moments import SourceMoments
from acclimate_adapters.balanced.passes import TorchPasses
from acclimate_adapters.merged import Work, guarded_steps, in_torch, mergeable
from acclimate_adapters.network.model import Pass

QUICK: Mapping[str, Mapping[str, Any]] = {"memo": {"views": 2}, "fedthe_plus": {"views": 2, "tuning_steps": 1}}
HEADS = ("bbse", "em", "fedcal", "fedthe", "none", "t3a")


def enrolled(adapter: Adapter, model: FrozenModel) -> State:
    """The state of a client that begins with labelled examples, where the adapter takes any."""
    if adapter.name not in ("fedthe", "fedthe_plus"):
        return adapter.init(model)
    inputs, labels = model.source.anchors
    return adapter.init(model, x=inputs, labels=labels)


def works_of(names: Sequence[str], model: FrozenModel, batches: Sequence[Tensor], **options: bool) -> list[Work]:
    adapters = [create(name, **QUICK.get(name, {})) for name in names]
    return [Work(a, enrolled(a, model), x, **options) for a, x in zip(adapters, batches, strict=True)]


def alone(model: FrozenModel, work: Work) -> Step:
    return guarded_step(work.adapter, model, work.state, work.x)


def assert_alike(one: Step | Exception, other: Step) -> None:
    assert isinstance(one, Step), one
    torch.testing.assert_close(one.logits, other.logits, rtol=1e-5, atol=1e-5)
    assert one.state.tensors.keys() == other.state.tensors.keys()
    assert (one.state.step, one.signals.keys()) == (other.state.step, other.signals.keys())
    for name, tensor in other.state.tensors.items():
        torch.testing.assert_close(one.state.tensors[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.fixture
def counted(model: FrozenModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each frozen pass that is taken from now on."""
    rows: list[int] = []
    frozen = model.frozen

    def counting(x: Tensor) -> Pass:
        rows.append(len(x))
        return frozen(x)

    monkeypatch.setattr(model, "frozen", counting)
    return rows


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_each_adapter_answers_in_company_as_alone(name: str, model: FrozenModel, streams: Tensor) -> None:
    batches = [streams[0, 0, :7], streams[1, 0], streams[2, 0, :1], streams[1, 1, :9], streams[2, 1, :12]]
    works = works_of([name, "none", "balanced", name, "em"], model, batches)
    for work, step in zip(works, guarded_steps(model, works), strict=True):
        assert_alike(step, alone(model, work))


@budget(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from((*HEADS, "balanced")), st.integers(1, 20)), min_size=1, max_size=6))
def test_any_company_of_any_sizes_changes_nobodys_answer(
    model: FrozenModel, streams: Tensor, company: list[tuple[str, int]]
) -> None:
    batches = [streams[i % 3, i // 3, :size] for i, (_, size) in enumerate(company)]
    works = works_of([name for name, _ in company], model, batches, compare=True)
    for work, step in zip(works, guarded_steps(model, works), strict=True):
        assert_alike(step, alone(model, work))
        assert isinstance(step, Step)
        torch.testing.assert_close(step.frozen_logits, model.frozen(work.x).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_a_step_is_on_frozen_of_the_frozen_pass(name: str, model: FrozenModel, streams: Tensor) -> None:
    adapter, x = create(name), streams[0, 0]
    assert isinstance(adapter, FrozenOnly)
    state = enrolled(adapter, model)
    step, parts = adapter.step(model, state, x), adapter.on_frozen(model, state, model.frozen(model.batch(x)))
    assert torch.equal(step.logits, parts.logits)
    assert step.signals == parts.signals


def test_all_share_one_frozen_pass(model: FrozenModel, streams: Tensor, counted: list[int]) -> None:
    works = works_of(HEADS, model, [streams[0, 0, : 3 + i] for i in range(len(HEADS))])
    guarded_steps(model, works)
    assert counted == [sum(len(work.x) for work in works)]


def test_frozen_logits_that_only_the_comparison_needs_come_from_that_pass(
    model: FrozenModel, streams: Tensor, counted: list[int]
) -> None:
    balanced, none = works_of(["balanced", "none"], model, [streams[0, 0], streams[1, 0]], compare=True)
    steps = guarded_steps(model, [balanced, none])
    assert counted == [40]
    assert all(isinstance(step, Step) and step.frozen_logits is not None for step in steps)


def test_balanced_clients_share_a_pass_only_with_equals(
    model: FrozenModel, streams: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    step_many = Balanced.step_many

    def counting(self: Balanced, model: FrozenModel, states: Sequence[State], *rest: Any) -> list[Step]:
        groups.append(len(states))
        return step_many(self, model, states, *rest)

    monkeypatch.setattr(Balanced, "step_many", counting)
    adapters = [Balanced(), Balanced(memory=0.9), Balanced()]
    works = [Work(a, a.init(model), streams[i, 0]) for i, a in enumerate(adapters)]
    guarded_steps(model, works)
    assert sorted(groups) == [1, 2]


def test_one_clients_bad_input_is_its_own_error(model: FrozenModel, streams: Tensor) -> None:
    names = ["none", "em", "balanced", "balanced"]
    spoilt = [streams[0, 0], streams[0, 0].clone().fill_(torch.nan), streams[1, 0], streams[2, 0][:0]]
    works = works_of(names, model, spoilt)
    first, second, third, fourth = guarded_steps(model, works)
    assert isinstance(second, InputError)
    assert isinstance(fourth, InputError)
    assert_alike(first, alone(model, works[0]))
    assert_alike(third, alone(model, works[2]))


def test_one_clients_foreign_state_is_its_own_error(model: FrozenModel, streams: Tensor) -> None:
    works = works_of(["em", "balanced", "balanced", "none"], model, [streams[0, i] for i in range(4)])
    foreign = State("em", 1, "0" * 16), State("balanced", 1, "0" * 16)
    strange = [Work(w.adapter, s, w.x) for w, s in zip(works[:2], foreign, strict=True)]
    first, second, third, fourth = guarded_steps(model, [*strange, *works[2:]])
    assert isinstance(first, StateMismatch)
    assert isinstance(second, StateMismatch)
    assert_alike(third, alone(model, works[2]))
    assert_alike(fourth, alone(model, works[3]))


def test_numbers_that_overflow_fall_back_for_their_client_alone(model: FrozenModel, streams: Tensor) -> None:
    huge = streams[0, 0] * 1e25  # its squares overflow, its pass does not
    works = works_of(["balanced", "balanced", "em"], model, [huge, streams[1, 0], streams[2, 0]])
    spoilt, *others = guarded_steps(model, works)
    assert isinstance(spoilt, Step)
    assert spoilt.signals["fallback"] == 1
    assert spoilt.state is works[0].state
    for step, work in zip(others, works[1:], strict=True):
        assert_alike(step, alone(model, work))


def test_batches_of_several_shapes_are_each_judged_by_themselves(model: FrozenModel, streams: Tensor) -> None:
    works = works_of(["none", "none", "none"], model, [streams[0, 0], streams[0, 1][..., :20], streams[0, 2]])
    first, second, third = guarded_steps(model, works)
    assert isinstance(second, InputError)
    assert_alike(first, alone(model, works[0]))
    assert_alike(third, alone(model, works[2]))


def test_a_network_that_normalises_by_the_batch_never_merges(logit_model: Callable[..., FrozenModel]) -> None:
    norm = nn.BatchNorm1d(2, track_running_stats=False)
    net = nn.Sequential(OrderedDict(norm=norm, head=nn.Linear(2, 2))).eval()
    mixing = FrozenModel.from_module(net, classifier="head", source=Source(prior=torch.full((2,), 0.5)))
    adapter = create("none")
    batches = [torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor([[9.0, 8.0], [7.0, 5.0]])]
    works = [Work(adapter, adapter.init(mixing), x) for x in batches]
    for work, step in zip(works, guarded_steps(mixing, works), strict=True):
        assert_alike(step, alone(mixing, work))
    assert not mergeable(adapter, mixing)
    assert mergeable(adapter, logit_model([0.5, 0.5]))


@pytest.mark.parametrize(
    ("name", "elsewhere", "passes", "expected"),
    [
        ("em", False, False, True),
        ("em", True, False, False),
        ("atp", True, True, True),
        ("bn_adapt+em", True, True, True),
        ("balanced", True, False, True),
        ("balanced", True, True, False),
        ("consensus", True, False, True),
        ("consensus", True, True, False),
    ],
)
def test_it_is_told_whether_torch_runs_the_network(
    name: str, elsewhere: bool, passes: bool, expected: bool, model: FrozenModel
) -> None:
    served = model.with_runtime(model.frozen) if elsewhere else model
    own = TorchPasses(model, SourceMoments.of(model)) if passes else None
    assert in_torch(create(name), served, own) == expected


@pytest.mark.parametrize("name", ["balanced", "consensus", "fedcal", "atp", "atp+fedcal"])
def test_the_influence_of_a_batch_is_bounded_as_alone(name: str, model: FrozenModel, streams: Tensor) -> None:
    adapter = create(name)
    states = [adapter.step(model, adapter.init(model), streams[client, 0, :5]).state for client in (0, 1)]
    works = [Work(adapter, state, streams[client, 1]) for client, state in enumerate(states)]
    for work, step in zip(works, guarded_steps(model, works, influence=0.5), strict=True):
        assert isinstance(step, Step)
        alone = guarded_step(adapter, model, work.state, work.x, influence=0.5)
        free = guarded_step(adapter, model, work.state, work.x)
        assert alone.state.to_bytes() != free.state.to_bytes()
        for key, tensor in alone.state.tensors.items():
            torch.testing.assert_close(step.state.tensors[key], tensor, rtol=1e-4, atol=1e-4)
