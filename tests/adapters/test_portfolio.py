"""`portfolio` against adapters that know nothing of each other, and a slow count of who was right."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from acclimate_adapters import (
    ConfigurationError,
    FrozenModel,
    InputError,
    Labelled,
    MissingSource,
    State,
    Step,
    UnknownAdapter,
    create,
    guarded_step,
    missing,
)
from acclimate_adapters.adapter import parts_of
from acclimate_adapters.compression.coding import decode, encode
from acclimate_adapters.compression.sensitivity import sensitivity
from acclimate_adapters.guard import bounded
from acclimate_adapters.portfolio import (
    LEAD,
    MEMORY,
    MOST_ARMS,
    SETTLED,
    STRENGTH,
    Portfolio,
    arm_of,
    at_rest,
    counted,
    remembered,
    scores,
    shrunk,
)

Models = Callable[..., FrozenModel]
ALONE = {
    "atp": create("atp"),
    "bn_adapt+em": create("bn_adapt+em"),
    "fedcal": create("fedcal", estimator="em"),
}


class Slow:
    """The definition from the arms by themselves, with exact numbers and lists of all that was told."""

    def __init__(self, model: FrozenModel, fleet: list[Fraction]) -> None:
        self.model, self.fleet = model, fleet
        self.states = {name: adapter.init(model) for name, adapter in ALONE.items()}
        self.predicted: list[list[int]] = []  # of each row so far: the frozen class, then each arm's
        self.told: list[tuple[list[int], int]] = []

    def rests(self, arm: int) -> bool:
        rows = [(classes, label) for classes, label in self.told if len(set(classes)) > 1]
        right = [sum(classes[each] == label for classes, label in rows) for each in range(len(self.fleet))]
        return len(rows) >= 32 and max(right) > right[arm] + 8

    def best(self) -> int:
        rows = [(classes, label) for classes, label in self.told if len(set(classes)) > 1]
        found = []
        for arm, share in enumerate(self.fleet):
            right = sum(classes[arm] == label for classes, label in rows)
            found.append((right + 8 * share) / (len(rows) + 8) + (Fraction(1, 100) if arm == 0 else 0))
        return found.index(max(found))

    def answer(self, x: Tensor) -> Tensor:
        logits = [self.model.frozen(x).logits]
        for arm, (name, adapter) in enumerate(ALONE.items(), start=1):
            if self.rests(arm):
                logits.append(logits[0])
                continue
            step = guarded_step(adapter, self.model, self.states[name], x)
            self.states[name] = step.state
            logits.append(step.logits)
        self.predicted += [[int(each[row].argmax()) for each in logits] for row in range(len(x))]
        return logits[self.best()]

    def tell(self, row: int, label: int) -> None:
        self.told.append((self.predicted[row], label))


def tell(model: FrozenModel, state: State, step: Step, rows: list[int], labels: list[int]) -> State:
    """The state once labels of some rows of a step came."""
    assert step.frozen_logits is not None
    assert step.by_arm is not None
    predicted = torch.cat([step.frozen_logits.argmax(-1, keepdim=True), step.by_arm], dim=1)[rows]
    return Portfolio().learn(model, state, Labelled(torch.tensor(labels), predicted=predicted))


@pytest.mark.parametrize("client", [0, 1, 2])
def test_it_answers_as_the_arm_that_a_slow_count_prefers(client: int, model: FrozenModel, streams: Tensor) -> None:
    """Every fourth row is labelled as one of the arms has it, in turn, so that the best one changes."""
    fleet = [Fraction(1, 2), Fraction(3, 5), Fraction(2, 5), Fraction(1, 2)]
    adapter, slow, answered = Portfolio(), Slow(model, fleet), set()
    state = adapter.informed(adapter.init(model), list(map(float, fleet)))
    for number, x in enumerate([*streams[client], *streams[(client + 1) % 3]]):
        expected, step = slow.answer(x), adapter.step(model, state, x)
        torch.testing.assert_close(step.logits.softmax(-1), expected.softmax(-1), rtol=0, atol=1e-5)
        answered.add(step.signals["arm"])
        assert step.by_arm is not None
        mine = [[row[0], *arms] for row, arms in zip(slow.predicted[-len(x) :], step.by_arm.tolist(), strict=True)]
        assert mine == slow.predicted[-len(x) :]
        rows = [*range(0, len(x), 2)]
        labels = [mine[row][number // 2 % 4] for row in rows]
        for row, label in zip(rows, labels, strict=True):
            slow.tell(len(slow.predicted) - len(x) + row, label)
        state = tell(model, step.state, step, rows, labels)
    assert len(answered) > 1
    for name, alone in slow.states.items():
        for key, tensor in alone.tensors.items():
            torch.testing.assert_close(state.tensors[f"{name}.{key}"], tensor, rtol=1e-4, atol=1e-5)


def test_the_score_shrinks_a_clients_share_towards_the_fleets() -> None:
    counts = np.array([4, 1, 3, 2, 0, 0, 0, 0])  # nobody, the frozen model, arm 1, both; none of those with arm 2
    fleet = np.array([0.5, 0.6, 0.1])
    expected = [(3 + 8 * 0.5) / 18 + 0.01, (5 + 8 * 0.6) / 18, (0 + 8 * 0.1) / 18]
    np.testing.assert_allclose(scores(counts, fleet), expected)
    np.testing.assert_allclose(shrunk(counts, fleet), expected - np.array([LEAD, 0, 0]))
    np.testing.assert_allclose(scores(np.zeros(8), fleet), [0.51, 0.6, 0.1])
    assert STRENGTH == 8


def test_a_choice_is_settled_where_so_many_labels_against_it_would_not_turn_it(model: FrozenModel) -> None:
    adapter, rng, found = Portfolio(arms=("t3a", "bn_adapt")), np.random.default_rng(0), list[bool]()
    for _ in range(200):
        counts = remembered(rng.integers(0, 15, 8).astype(float))
        fleet, more = rng.uniform(0.2, 0.8, 3), int(rng.integers(1, 30))
        state = adapter.informed(adapter.init(model), fleet.tolist())
        state = replace(state, tensors={**state.tensors, "counts": torch.from_numpy(counts)})
        first = int(scores(counts, fleet).argmax())
        turned = []
        for other in {0, 1, 2} - {first}:
            against = counts.copy()
            for _ in range(more):
                against[2**other] += 1
                against = remembered(against)
            turned.append(int(scores(against, fleet).argmax()) != first)
        found.append(not any(turned))
        rivals = adapter.rivals(state, more)
        assert (rivals is None) == found[-1]
        if rivals is not None:
            ordered = sorted(scores(counts, fleet), reverse=True)
            assert [scores(counts, fleet)[arm] for arm in rivals] == ordered[:2]
    assert 20 < sum(found) < 180


def test_what_labels_said_long_ago_fades_so_that_an_arm_at_rest_wakes(model: FrozenModel, streams: Tensor) -> None:
    adapter, x = Portfolio(), streams[0]
    step = adapter.step(model, adapter.init(model), x[0])
    assert step.by_arm is not None

    def told(state: State, right: int, rows: int) -> State:
        """So many more labels, all of rows that one arm has right alone: 1 is `atp`, 0 the frozen model."""
        predicted = torch.tensor([[place + (place == right) for place in range(4)]] * rows)
        predicted[:, right] = 5
        return adapter.learn(model, state, Labelled(torch.full((rows,), 5), predicted=predicted))

    state = step.state
    for _ in range(20):
        state = told(state, right=1, rows=20)
    assert float(state.tensors["counts"].sum()) == pytest.approx(MEMORY)
    assert adapter.told(state)[0b0010] == MEMORY
    rested = adapter.step(model, state, x[1])
    assert (rested.signals["arm"], rested.state.tensors["steps"].tolist()) == (1.0, [2, 1, 1])
    against = 0
    while adapter.step(model, state, x[1]).signals["arm"] == 1.0:
        state, against = told(state, right=0, rows=1), against + 1
    assert 30 < against < 50, "400 labels spoke for the arm, and as many would be needed against it without fading"


def test_labels_of_earlier_versions_which_kept_all_are_remembered_like_others(model: FrozenModel) -> None:
    adapter = Portfolio()
    state = adapter.init(model)
    kinds = torch.arange(16) * 5
    earlier = replace(state, tensors={**state.tensors, "counts": kinds})
    earlier.require_form(adapter.form(model, earlier))
    now = replace(state, tensors={**state.tensors, "counts": kinds.double() * (MEMORY / float(kinds.sum()))})
    assert adapter.told(earlier) == adapter.told(now)
    rows = Labelled(torch.tensor([1]), predicted=torch.tensor([[1, 2, 1, 1]]))
    after = (adapter.learn(model, each, rows).tensors["counts"] for each in (earlier, now))
    torch.testing.assert_close(*after)


def test_rows_in_which_no_arm_differs_count_for_nothing() -> None:
    predicted = torch.tensor([[1, 1, 1], [1, 2, 1], [1, 1, 2], [1, 2, 2], [1, 2, 3]])
    labels = torch.tensor([1, 2, 1, 0, 3])
    right = [{1}, {0, 1}, set(), {2}]  # of the rows but the first: the second is right by arm 1 alone, and so on
    expected = [0] * 8
    for arms in right:
        expected[sum(2**arm for arm in arms)] += 1
    assert counted(predicted, labels).tolist() == expected


@given(
    counts=arrays(np.int64, 16, elements=st.integers(0, 60)),
    fleet=arrays(np.float64, 4, elements=st.floats(0, 1)),
)
def test_an_arm_at_rest_never_answers_whatever_the_fleet_says(counts: Any, fleet: Any) -> None:
    resting = at_rest(counts.astype(np.float64), 4)
    chosen = int(scores(counts.astype(np.float64), fleet).argmax())
    assert chosen == 0 or not resting[chosen]
    assert not resting.any() or counts.sum() >= SETTLED


def test_an_arm_that_cannot_win_rests_and_wakes_when_the_arm_before_it_is_wrong(
    model: FrozenModel, streams: Tensor
) -> None:
    adapter, x = Portfolio(), streams[0]
    state = adapter.step(model, adapter.init(model), x[0]).state
    counts = torch.zeros(16, dtype=torch.int64)
    counts[0b0010], counts[0b0000] = 9, SETTLED - 9  # atp has nine more right than any other
    state = replace(state, tensors={**state.tensors, "counts": counts})
    rested = adapter.step(model, state, x[1])
    assert rested.state.tensors["steps"].tolist() == [2, 1, 1]
    assert rested.frozen_logits is not None
    assert rested.by_arm is not None
    frozen = rested.frozen_logits.argmax(-1)
    assert torch.equal(rested.by_arm[:, 1:], frozen[:, None].expand(-1, 2))
    for name, tensor in state.tensors.items():
        if name.startswith(("bn_adapt+em.", "fedcal.")):
            assert torch.equal(rested.state.tensors[name], tensor), name
    drifted = counts.clone()
    drifted[0b1101] += 1  # a row that atp alone has wrong, the others at rest counting as the frozen model
    woken = adapter.step(model, replace(state, tensors={**state.tensors, "counts": drifted}), x[1])
    assert woken.state.tensors["steps"].tolist() == [2, 2, 2]


def test_without_a_label_the_frozen_model_answers_and_the_arms_go_on(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("portfolio")
    state = adapter.init(model)
    for x in streams[0]:
        step = adapter.step(model, state, x)
        state = step.state
        assert torch.equal(step.logits.argmax(-1), model.frozen(x).logits.argmax(-1))
        assert step.signals["arm"] == 0
    assert state.tensors["steps"].tolist() == [len(streams[0])] * 3
    assert 0 < step.signals["differing"] < 1


def test_the_fleet_decides_for_a_client_that_told_nothing(model: FrozenModel, streams: Tensor) -> None:
    adapter = Portfolio()
    state = adapter.informed(adapter.init(model), [0.5, 0.505, 0.52, 0.4])
    assert adapter.step(model, state, streams[0, 0]).signals["arm"] == 2
    state = adapter.informed(state, [0.5, 0.505, 0.505, 0.4])
    assert adapter.step(model, state, streams[0, 0]).signals["arm"] == 0, "0.01 ahead"


def test_an_arm_that_was_proven_to_gain_answers_before_anybody_tells(model: FrozenModel, streams: Tensor) -> None:
    proven = model.with_gains({create("fedcal", estimator="em"): 0.03, create("tent"): 0.5})
    adapter = Portfolio()
    state = adapter.init(proven)
    assert state.tensors["fleet"].tolist() == [0.5, 0.5, 0.5, 0.53]
    assert adapter.step(proven, state, streams[0, 0]).signals["arm"] == 3
    assert adapter.step(model, adapter.init(model), streams[0, 0]).signals["arm"] == 0


def test_the_fleets_rows_are_shrunk_towards_what_was_known_before(model: FrozenModel) -> None:
    proven, adapter, kinds = model.with_gains({create("atp"): 0.05}), Portfolio(), [0] * 16
    assert adapter.shares(proven, kinds) == (0.5, 0.55, 0.5, 0.5)
    kinds[0b0110], kinds[0b0001], kinds[0] = 5, 2, 1
    expected = [(2 + 8 * 0.5) / 16, (5 + 8 * 0.55) / 16, (5 + 8 * 0.5) / 16, 8 * 0.5 / 16]
    np.testing.assert_allclose(adapter.shares(proven, kinds), expected)
    state = adapter.informed(adapter.init(proven), adapter.shares(proven, kinds))
    np.testing.assert_allclose(state.tensors["fleet"], expected)


def test_labels_of_rows_that_nobody_predicted_change_nothing(model: FrozenModel) -> None:
    adapter = Portfolio()
    state = adapter.init(model)
    assert adapter.learn(model, state, Labelled(torch.tensor([1]))).to_bytes() == state.to_bytes()
    with pytest.raises(InputError, match=r"of shape \[1, 4\], not \[1, 3\]"):
        adapter.learn(model, state, Labelled(torch.tensor([1]), predicted=torch.zeros(1, 3, dtype=torch.int64)))
    with pytest.raises(InputError, match="from 0 to 9"):
        adapter.learn(model, state, Labelled(torch.tensor([10]), predicted=torch.zeros(1, 4, dtype=torch.int64)))


def test_arms_that_learn_take_their_labels_too(model: FrozenModel, streams: Tensor) -> None:
    arm = "fedcal(label_weight=5)"
    adapter, alone = Portfolio((arm,)), create("fedcal", label_weight=5)
    state = adapter.step(model, adapter.init(model), streams[0, 0]).state
    told = adapter.learn(model, state, Labelled(torch.tensor([3, 3])))
    expected = alone.learn(  # type: ignore[attr-defined]
        model, alone.step(model, alone.init(model), streams[0, 0]).state, Labelled(torch.tensor([3, 3]))
    )
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(told.tensors[f"fedcal.{name}"], tensor)


def test_an_arm_that_fails_is_the_frozen_model_there_and_goes_on_as_if_that_batch_had_not_been(
    model: FrozenModel, streams: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acclimate_adapters import NumericalError
    from acclimate_adapters.methods.atp import Atp

    adapter = Portfolio()
    before = adapter.informed(adapter.step(model, adapter.init(model), streams[0, 0]).state, [0, 1, 0, 0])

    def fail(*_: Any) -> Step:
        raise NumericalError("too large")

    with monkeypatch.context() as patch:
        patch.setattr(Atp, "step", fail)
        step = adapter.step(model, before, streams[0, 1])
    assert step.signals["arm"] == 1
    torch.testing.assert_close(step.logits, model.frozen(streams[0, 1]).logits)
    assert step.state.tensors["steps"].tolist() == [1, 2, 2]
    for name, tensor in before.tensors.items():
        assert not name.startswith("atp.") or torch.equal(tensor, step.state.tensors[name])
    after = adapter.step(model, step.state, streams[0, 2])
    alone = create("atp")
    expected = alone.step(model, alone.step(model, alone.init(model), streams[0, 0]).state, streams[0, 2])
    torch.testing.assert_close(after.logits, expected.logits, rtol=0, atol=1e-5)


def test_what_the_frozen_model_cannot_answer_is_an_error_of_the_batch(model: FrozenModel, streams: Tensor) -> None:
    from acclimate_adapters import NumericalError

    adapter = Portfolio()
    with pytest.raises(NumericalError):
        adapter.step(model, adapter.init(model), streams[0, 0] * 1e38)


def test_frames_that_tell_nothing_are_predicted_by_every_arm_as_by_the_frozen_model(
    model: FrozenModel, streams: Tensor
) -> None:
    x = streams[0, 0].clone()
    x[3], x[5] = 0.25, x[4]
    step = guarded_step(Portfolio(), model, Portfolio().init(model), x)
    assert step.by_arm is not None
    assert step.by_arm.shape == (20, 3)
    assert step.by_arm[3].tolist() == [int(model.frozen(x[3:4]).logits.argmax())] * 3
    assert torch.equal(step.by_arm[5], step.by_arm[4])


def test_each_arm_is_bounded_in_its_own_way(model: FrozenModel, streams: Tensor) -> None:
    adapter, small = Portfolio(), streams[0, 0, :5]
    before = adapter.step(model, adapter.init(model), small).state
    after = adapter.step(model, before, streams[0, 1]).state
    kept = bounded(adapter, model, before, after, 20, 0.5)
    for name, arm in ALONE.items():
        first = arm.step(model, arm.init(model), small).state
        expected = bounded(arm, model, first, arm.step(model, first, streams[0, 1]).state, 20, 0.5)
        for key, tensor in expected.tensors.items():
            torch.testing.assert_close(kept.tensors[f"{name}.{key}"], tensor, rtol=1e-4, atol=1e-5)


def test_states_of_arms_are_stored_as_small_as_each_alone(model: FrozenModel, streams: Tensor) -> None:
    adapter, alone = Portfolio(), create("atp")
    states = [each.step(model, each.init(model), streams[0, 0]).state for each in (adapter, alone)]
    stored = [
        encode(state, 0.125, sensitivity(each, model)) for each, state in zip((adapter, alone), states, strict=True)
    ]
    window = states[0].tensors["fedcal.log_posteriors"].nbytes
    assert len(stored[0]) < 1.1 * (len(stored[1]) + window) + 1000
    assert decode(stored[0]).tensors["counts"].equal(states[0].tensors["counts"])


def test_default_arms_are_those_that_the_model_can_serve(make_model: Models) -> None:
    bare = make_model(rates=None)
    assert [arm.name for arm in Portfolio().served(bare)] == ["bn_adapt+em", "fedcal"]
    assert missing(Portfolio(), bare) == ()
    assert Portfolio().init(bare).tensors["counts"].shape == (8,)
    assert missing(Portfolio(("atp",)), bare) == ("rates",)
    with pytest.raises(MissingSource, match="rates"):
        Portfolio(("atp",)).init(bare)


@pytest.mark.parametrize(
    ("arm", "adapter"),
    [
        ("t3a", create("t3a")),
        ("fedcal(estimator=em, window=50)", create("fedcal", estimator="em", window=50)),
        ("bn_adapt(prior_strength=1e+2)+em", create("bn_adapt+em", bn_adapt={"prior_strength": 100.0})),
    ],
)
def test_arms_are_named_with_their_hyper_parameters(arm: str, adapter: Any) -> None:
    assert arm_of(arm) == adapter


@pytest.mark.parametrize(
    ("arms", "error"),
    [
        (("portfolio",), "there is no adapter 'portfolio'"),
        (("apt",), "there is no adapter 'apt'"),
        (("none",), "the frozen model is always one of them"),
        (("fedcal(estimator=no)",), "estimator='no'"),
        (("fedcal(estimator=em",), "is no adapter; use a name"),
        (("",), "is no adapter; use a name"),
        (("fedcal", "fedcal(estimator=em)"), "'fedcal' is there more than once"),
        (tuple(map(str, range(MOST_ARMS + 1))), f"{MOST_ARMS} are the most"),
    ],
)
def test_what_is_no_arm_is_refused(arms: tuple[str, ...], error: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^arms: ") as raised:
        create("portfolio", arms=arms)
    assert error in str(raised.value)
    assert not isinstance(raised.value, UnknownAdapter)


def test_a_state_of_other_arms_is_another_layout() -> None:
    layouts = {Portfolio(arms).layout for arms in [(), ("t3a",), ("fedcal",), ("fedcal(estimator=em)",)]}
    assert len(layouts) == 4
    assert Portfolio().layout == Portfolio(("atp", "bn_adapt+em", "fedcal(estimator=em)")).layout


def test_who_is_part_of_it_can_be_told() -> None:
    assert parts_of(Portfolio()) == {"portfolio", "atp", "bn_adapt", "em", "fedcal"}
    assert parts_of(create("atp+em")) == {"atp", "em"}


def test_it_cannot_be_part_of_a_chain() -> None:
    with pytest.raises(ConfigurationError, match="no class prior can be corrected beside 'portfolio'"):
        create("portfolio+em")
