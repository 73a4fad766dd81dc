"""`portfolio`: several adapters side by side for each client, of which the one answers that labels prefer."""

import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acclimate_adapters.adapter import (
    Adapter,
    FrozenOnly,
    Step,
    complete,
    missing,
    parts_of,
    require,
    require_state,
    shows_frozen,
    slices,
    step_cost,
)
from acclimate_adapters.by_name import SINGLE, make
from acclimate_adapters.compression.sensitivity import sensitivity
from acclimate_adapters.cost import Cost, Runs, forward_pass
from acclimate_adapters.errors import ConfigurationError, InputError, NumericalError
from acclimate_adapters.functional import Numbers, class_labels, entropy, numbers
from acclimate_adapters.guard import bounded, guard
from acclimate_adapters.hyperparameters import check, names
from acclimate_adapters.labels import Labelled, learns
from acclimate_adapters.methods.chain import join, part_of
from acclimate_adapters.network.model import FrozenModel, Pass
from acclimate_adapters.state import LARGEST_COUNT, Form, State, count

STRENGTH: Final = 8.0
"""Labelled rows that the fleet counts for beside those of the client."""
LEAD: Final = 0.01
"""Share of right answers by which the frozen model is ahead."""
SETTLED: Final = 32
"""Labelled rows of a client before which none of its arms rests: with so many it counts for the fleet."""
MEMORY: Final = 64.0
"""Labelled rows of a client that count at most. Of more, all count for less, so that those fade that came long ago."""
MOST_ARMS: Final = 5
"""Adapters beside the frozen model. Few labels mistake one of many sooner: five did worse than three."""
DEFAULT_ARMS: Final = ("atp", "bn_adapt+em", "fedcal(estimator=em)")
NO_OPINION: Final = 0.5
"""Share of right answers of every arm, the frozen model included, of which nothing is known."""
_PART: Final = re.compile(r"(?P<name>\w+)(?:\((?P<options>[^()]+)\))?")
Taken: TypeAlias = Step | NumericalError


@dataclass(frozen=True, slots=True)
class Portfolio:
    """Let several adapters follow a client, and answer with the one that labels prefer.

    This project's own method, not one of a paper.

    Method (equations numbered here):
        arms   0, the frozen model, and A adapters, each with a state of its own, which all see every batch
        rows   that count: labelled ones of which an arm predicted another class than the frozen model. n are those of
               the client, of which arm a had r_a right. Beyond 64 of them, n and r_a are multiplied by 64 / n
        f_a    share that arm a has right of such rows of all clients (`informed`), these 8 rows more: the share `prior`
        score  s_a = (r_a + 8 f_a) / (n + 8), and 0.01 more for arm 0                                        (1)
        answer to a batch: that of the arm with the largest score, the first of equal ones                    (2)
        rest   arm a takes no step while n >= 32 and r_b - r_a > 8 of some other arm b                        (3)
        Which rows count depends on predictions alone, and each arm is compared on all of them.

    An arm at rest never answers: f_a - f_b is at most 1, so r_a + 8 f_a < r_b + 8 f_b, and only the frozen model has a
    lead. Meanwhile it counts as the frozen model, and costs nothing. It wakes when labels show drift: rows that the
    arms before it have wrong, and the frozen model right. Then it goes on from the state in which it came to rest.

    The passes are shared: one frozen pass at most serves all arms that need no other, and an arm that computes
    gradients at the global weights has it for nothing. An arm whose step fails or collapses, as the guard rails see it,
    goes on as if this batch had not been, and counts as the frozen model there.

    Departures: none.

    Args:
        arms: adapters beside the frozen model, by name, with hyper-parameters in parentheses, such as
            "fedcal(estimator=em)" or "bn_adapt(prior_strength=8)+em". None at all stands for those of `DEFAULT_ARMS`
            that the model can serve.

    Reference: docs/explanation-portfolio.md.
    """

    name: ClassVar[str] = "portfolio"
    learns: ClassVar[bool] = True
    uncorrectable: ClassVar[str] = "corrected for the client's class prior by some of its arms"

    arms: tuple[str, ...] = names(doc="adapters beside the frozen model; none: atp, bn_adapt+em and fedcal by em")

    def __post_init__(self) -> None:
        """Refuse arms that are none."""
        check(self)
        if len(self.arms) > MOST_ARMS:
            raise ConfigurationError(f"arms: {len(self.arms)} are too many, {MOST_ARMS} are the most")
        found = [arm.name for arm in self._named]
        if twice := [name for number, name in enumerate(found) if name in found[:number]]:
            raise ConfigurationError(f"arms: {twice[0]!r} is there more than once; use it with one set of options")

    @property
    def _named(self) -> Sequence[Adapter]:
        return [arm_of(text) for text in self.arms or DEFAULT_ARMS]

    @property
    def parts(self) -> frozenset[str]:
        """The arms, the parts of those that are chains, and the portfolio itself."""
        return frozenset({self.name}).union(*map(parts_of, self._named))

    @property
    def layout(self) -> int:
        """A digest of the arms: names, hyper-parameters and layouts."""
        described = json.dumps([[text, arm_of(text).layout] for text in self.arms or DEFAULT_ARMS])
        return int.from_bytes(blake2b(described.encode(), digest_size=6).digest(), "big")

    @property
    def needs(self) -> frozenset[str]:
        """What any of the arms needs."""
        return frozenset[str]().union(*(arm.needs for arm in self._named))

    @property
    def dispensable(self) -> frozenset[str]:
        """All of it for the default arms: those that the model cannot serve are left out."""
        return frozenset() if self.arms else self.needs

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet: those of the arms, and no label of anybody.

        Raises:
            MissingSource: the model lacks something that an arm needs which was asked for.
        """
        require(self, model)
        arms = self.served(model)
        own = _joined([arm.init(model) for arm in arms])
        own["counts"] = torch.zeros(2 ** (1 + len(arms)), dtype=torch.float64)
        own["fleet"] = torch.from_numpy(self.prior(model))
        return State(self.name, self.layout, model.content_hash, tensors=own)

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """Those of the arms, batches of each, labelled rows by kind, and the fleet's shares, as `Adapter.form`."""
        arms = self.served(model)
        forms = {
            f"{arm.name}.{name}": form for arm in arms for name, form in arm.form(model, part_of(state, arm)).items()
        }
        shares = Form((1 + len(arms),), (torch.float64,), 0, 1)
        counts = Form((2 ** (1 + len(arms)),), (torch.float64, torch.int64), 0, LARGEST_COUNT)  # earlier versions: int
        return {**forms, "steps": count(len(arms)), "counts": counts, "fleet": shares}

    def served(self, model: FrozenModel) -> tuple[Adapter, ...]:
        """The arms beside the frozen model, in the order of `Step.by_arm`."""
        return model.derived(_served, self)

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """Those of the arms, which take one frozen pass together, as `Costly.cost`."""
        arms = self.served(model)
        costs = [step_cost(arm, model, rows) for arm in arms]
        whole = [
            cost._replace(forward=Runs()) if isinstance(arm, FrozenOnly) else cost
            for arm, cost in zip(arms, costs, strict=True)
        ]
        frozen = Cost() if any(map(shows_frozen, arms)) else forward_pass(rows)
        return frozen.and_also(*whole)

    def sensitivity(self, model: FrozenModel) -> dict[str, float]:
        """That of each arm, as `Tolerant.sensitivity`."""
        return {
            f"{arm.name}.{name}": weight
            for arm in self.served(model)
            for name, weight in sensitivity(arm, model).items()
        }

    def bounded(self, model: FrozenModel, before: State, after: State, rows: int, influence: float) -> State:
        """Each arm bounded in its own way, as `Bounding.bounded`."""
        arms = self.served(model)
        parts = [
            bounded(arm, model, one, other, rows, influence)
            for arm, one, other in zip(arms, _parts(arms, before), _parts(arms, after), strict=True)
        ]
        return replace(after, tensors={**after.tensors, **_joined(parts)})

    def learn(self, model: FrozenModel, state: State, rows: Labelled) -> State:
        """Count labelled rows of which it is known what the arms predicted, as `Learning.learn`.

        Arms that learn from labels take theirs in, too.
        """
        require_state(self, model, state)
        arms = self.served(model)
        labels = class_labels(rows.labels, len(rows.labels), model.classes)
        parts = [
            arm.learn(model, part, rows) if learns(arm) else part
            for arm, part in zip(arms, _parts(arms, state), strict=True)
        ]
        tensors = {**state.tensors, **_joined(parts)}
        if rows.predicted is not None:
            wanted = (len(labels), 1 + len(arms))
            if rows.predicted.shape != wanted:
                raise InputError(f"predicted classes are needed of shape {[*wanted]}, not {[*rows.predicted.shape]}")
            counts = remembered(_counts(state) + numbers(counted(rows.predicted, labels)))
            tensors["counts"] = torch.from_numpy(counts)
        return replace(state, tensors=tensors)

    def told(self, state: State) -> tuple[int, ...]:
        """Labelled rows of this client by kind, as `counted` gives them; as `Informed.told`.

        Whole numbers, which they are until rows fade; by then all that the client has to say in the fleet was told.
        """
        return tuple(map(round, _counts(state).tolist()))

    def shares(self, model: FrozenModel, kinds: Sequence[int]) -> tuple[float, ...]:
        """Those of the fleet, shrunk towards what was known before anybody told a label; as `Informed.shares`."""
        return tuple(shrunk(np.array(kinds, np.float64), self.prior(model)).tolist())

    def prior(self, model: FrozenModel) -> Numbers:
        """Share of right answers [1 + A] that each arm is taken to have before anybody tells a label.

        Equal ones, but for an arm that was proven to gain before deployment, which is ahead by the least that it gains.
        """
        gains = [model.gains.get(arm, 0.0) for arm in self.served(model)]
        return NO_OPINION + np.array([0.0, *gains])

    def rivals(self, state: State, labels: float) -> tuple[int, int] | None:
        """The two arms with the largest scores, unless the first is ahead by more rows; as `Informed.rivals`.

        By then earlier rows may have faded: one label after another beyond 64 leaves 64 of 65 parts of all before it.
        """
        counts, fleet = _counts(state), numbers(state.tensors["fleet"])
        first, second = two_best(scores(counts, fleet))
        right, n = _right(counts, len(fleet)), counts.sum()
        whole = min(labels, max(0.0, MEMORY - n))
        kept = (MEMORY / (MEMORY + 1)) ** (labels - whole)
        ahead = (right[first] - right - whole) * kept - MEMORY * (1 - kept) + STRENGTH * (fleet[first] - fleet)
        places = np.arange(len(fleet))
        ahead += LEAD * (min(n + labels, MEMORY) + STRENGTH) * (float(first == 0) - (places == 0))
        return None if ahead[places != first].min() > 0 else (first, second)

    def informed(self, state: State, shares: Sequence[float]) -> State:
        """The state that knows the fleet's shares f_a, [1 + A] in 0..1, arm 0 first; as `Informed.informed`."""
        fleet = torch.tensor(shares, dtype=torch.float64)
        return replace(state, tensors={**state.tensors, "fleet": fleet})

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        return complete(self.slices(model, state, x))

    def slices(self, model: FrozenModel, state: State, x: Tensor) -> Generator[None, None, Step]:
        """The step with a pause after each arm, as `Sliced.slices`."""
        require_state(self, model, state)
        x, arms = model.batch(x), self.served(model)
        parts, frozen, taken = _parts(arms, state), None, dict[int, Taken]()
        resting = at_rest(_counts(state), 1 + len(arms))[1:]
        awake = [(a, arm) for a, arm in enumerate(arms) if not resting[a]]
        for a, arm in awake:
            if not isinstance(arm, FrozenOnly):
                taken[a] = yield from _taken(arm, model, parts[a], x)
                frozen = frozen or _frozen_of(taken[a])
                yield
        whole = frozen or model.frozen(x)
        for a, arm in awake:
            if isinstance(arm, FrozenOnly):
                taken[a] = _on_frozen(arm, model, parts[a], whole)
        steps = [
            guard(partial(_given, taken[a]), part, lambda: whole.logits) if a in taken else Step(whole.logits, part)
            for a, part in enumerate(parts)
        ]
        return self._answer(state, whole, steps)

    def _answer(self, state: State, frozen: Pass, steps: Sequence[Step]) -> Step:
        """The answer of the arm with the largest score (2)."""
        chosen = int(scores(_counts(state), numbers(state.tensors["fleet"])).argmax())
        given = steps[chosen - 1] if chosen else Step(frozen.logits, state, features=frozen.features)
        before = frozen.logits.argmax(dim=-1, keepdim=True)
        by_arm = torch.cat([before[:, :0], *(step.logits.argmax(dim=-1, keepdim=True) for step in steps)], dim=1)
        signals = {
            "entropy": float(entropy(given.logits).mean()),
            "arm": float(chosen),
            "differing": float((by_arm != before).any(dim=1).double().mean()),
        }
        return Step(
            given.logits,
            state.next({**state.tensors, **_joined([step.state for step in steps])}),
            signals,
            frozen.logits,
            frozen.features if given.features is None else given.features,
            given.uncorrected,
            frozen.features,
            by_arm,
        )


def remembered(counts: Numbers) -> Numbers:
    """Labelled rows by kind [2 ** (1 + A)], all of which count for less where they are more than `MEMORY`."""
    return counts * min(1.0, MEMORY / max(1.0, float(counts.sum())))


def shrunk(counts: Numbers, towards: Numbers) -> Numbers:
    """Shares of right answers among labelled rows, shrunk towards others, the frozen model first: (1) without the lead.

    Towards those of the fleet for a client; for the fleet itself towards what is known before anybody tells a label.

    Args:
        counts: [2 ** (1 + A)], labelled rows by kind, as `counted` gives them.
        towards: [1 + A], in 0..1.

    Returns:
        [1 + A], in 0..1.
    """
    found: Numbers = (_right(counts, len(towards)) + STRENGTH * towards) / (counts.sum() + STRENGTH)
    return found


def at_rest(counts: Numbers, arms: int) -> NDArray[np.bool_]:
    """Which arms take no step, because none of what others may tell could make them answer (3).

    Args:
        counts: as in `shrunk`.
        arms: how many, the frozen model included, which is the first.

    Returns:
        [arms].
    """
    right = _right(counts, arms)
    found: NDArray[np.bool_] = (right.max() - right > STRENGTH) & (counts.sum() >= SETTLED)
    return found


def _right(counts: Numbers, arms: int) -> Numbers:
    """How many labelled rows each arm has right, [arms]."""
    found: Numbers = (np.arange(len(counts)) >> np.arange(arms)[:, None] & 1) @ counts
    return found


def scores(counts: Numbers, fleet: Numbers) -> Numbers:
    """The score of each arm for a client, the frozen model first (1); arguments as in `shrunk`."""
    found = shrunk(counts, fleet)
    found[0] += LEAD
    return found


def two_best(scores: Numbers) -> tuple[int, int]:
    """The places of the largest score and of the next one, the first of equal ones."""
    first, second = np.argsort(-scores, kind="stable")[:2].tolist()
    return first, second


def counted(predicted: Tensor, labels: Tensor) -> Tensor:
    """Rows of which an arm predicted another class than the frozen model, by which arms were right.

    Args:
        predicted: [N, 1 + A], classes; the frozen model's first.
        labels: [N], the true ones.

    Returns:
        [2 ** (1 + A)], int64: at the sum of 2 ** a over the arms a that are right, how many such rows there are.
    """
    right = (predicted == labels.to(predicted)[:, None])[(predicted != predicted[:, :1]).any(dim=1)]
    kinds = (right * 2 ** torch.arange(right.shape[1], device=right.device)).sum(dim=1)
    return torch.bincount(kinds, minlength=2 ** right.shape[1]).cpu()


@lru_cache(256)  # clients choose them: there is no end of them
def arm_of(text: str) -> Adapter:
    """The adapter that an arm names, such as `atp`, `fedcal(estimator=em)` or `bn_adapt(prior_strength=8)+em`.

    Raises:
        ConfigurationError: there is no such adapter, or none with these hyper-parameters.
    """
    found = list[tuple[str, dict[str, Any]]]()
    for part in re.split(r"\+(?![^(]*\))", text):
        match = _PART.fullmatch(part)
        if match is None:
            raise ConfigurationError(
                f"arms: {text!r} is no adapter; use a name with its hyper-parameters in parentheses, such as "
                "'fedcal(estimator=em, window=50)'"
            )
        options = match["options"].split(",") if match["options"] else []
        found.append((match["name"], dict(map(_option, options))))
    if found[0][0] == "none":
        raise ConfigurationError("arms: the frozen model is always one of them; leave 'none' out")
    try:
        if len(found) == 1:
            return make(SINGLE, *found[0])
        return make(SINGLE, "+".join(name for name, _ in found), dict(found))
    except ConfigurationError as error:
        raise ConfigurationError(f"arms: {text!r}: {error}") from error


def _option(text: str) -> tuple[str, Any]:
    """A hyper-parameter and its value, from `name=value`; what is no JSON is a word."""
    name, _, value = (part.strip() for part in text.partition("="))
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _served(model: FrozenModel, portfolio: Portfolio) -> tuple[Adapter, ...]:
    return tuple(arm for arm in portfolio._named if not missing(arm, model))


def _counts(state: State) -> Numbers:
    """The client's labelled rows by kind; earlier versions kept all that ever came."""
    return remembered(numbers(state.tensors["counts"]))


def _parts(arms: Sequence[Adapter], state: State) -> list[State]:
    """The state of each arm, which counts the batches that it has taken in."""
    steps: list[int] = state.tensors["steps"].tolist()
    return [replace(part_of(state, arm), step=step) for arm, step in zip(arms, steps, strict=True)]


def _joined(parts: Sequence[State]) -> dict[str, Tensor]:
    """The tensors of the arms' states, and how many batches each has taken in."""
    return {**join(parts), "steps": torch.tensor([part.step for part in parts], dtype=torch.int64)}


def _taken(arm: Adapter, model: FrozenModel, state: State, x: Tensor) -> Generator[None, None, Taken]:
    """An arm's step, or why it failed, which is held against it alone."""
    try:
        return (yield from slices(arm, model, state, x))
    except NumericalError as error:
        return error


def _on_frozen(arm: FrozenOnly, model: FrozenModel, state: State, frozen: Pass) -> Taken:
    try:
        return arm.on_frozen(model, state, frozen)
    except NumericalError as error:
        return error


def _given(taken: Taken) -> Step:
    if isinstance(taken, NumericalError):
        raise taken
    return taken


def _frozen_of(taken: Taken) -> Pass | None:
    """The frozen pass that a step came across."""
    if isinstance(taken, NumericalError) or taken.frozen_features is None or taken.frozen_logits is None:
        return None
    return Pass(taken.frozen_features, taken.frozen_logits)
