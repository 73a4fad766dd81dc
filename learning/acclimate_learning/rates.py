"""ATP's adaptation rates, learned from simulated or real source clients (Algorithm 1 of Bao et al., NeurIPS 2023).

Around the algorithm stands what the paper leaves to its reader: the learning rate is found by a short search, rounds
end when other clients gain no more, and rates that run away stop it with advice.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters import FrozenModel
from acclimate_adapters.methods.atp import adapt
from acclimate_adapters.methods.atp_training import average, refine
from acclimate_adapters.network.direction import direction
from acclimate_learning.clients import Client
from acclimate_learning.errors import LearningError
from acclimate_learning.judging import BATCH
from acclimate_store import InputSpec

Rates = dict[str, float]
Progress = Callable[[str], None]

LADDER: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Learning rates of the rates among which is searched."""
FIRST: Final = LADDER.index(0.1)
"""Where the search begins: the paper has 0.1 and 0.5, in hundreds of rounds."""
WORSE: Final = 1.5
"""With a loss so many times that of the frozen model, the rates have run away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How rates are learned.

    Args:
        rounds: of communication, T.
        cohort: clients of a round, drawn anew for each, C; 0 for all.
        epochs: passes of a client over its images in a round, E.
        lr: eta; None searches.
        search_rounds: of each learning rate that is tried.
        check_every: rounds between two looks at the tuning clients.
        patience: looks without a better loss after which it ends.
        batch: images of a batch, B.
        seed: which clients each round has, and the order of their images.
    """

    rounds: int = 120
    cohort: int = 30
    epochs: int = 1
    lr: float | None = None
    search_rounds: int = 6
    check_every: int = 5
    patience: int = 8
    batch: int = BATCH
    seed: int = 0


@dataclass(slots=True)
class Learned:
    """Rates, and how they came about.

    Args:
        rates: alpha of every module: the mean over some rounds with the least loss on the tuning clients.
        lr: eta that was used.
        losses: cross-entropy on the tuning clients by round; of round 0 that of the frozen model.
        rounds: that were run.
        notes: learning rates that were given up, each with advice.
    """

    rates: Rates
    lr: float
    losses: dict[int, float] = field(default_factory=dict)
    rounds: int = 0
    notes: tuple[str, ...] = ()


def learn_rates(
    model: FrozenModel,
    spec: InputSpec,
    teachers: Sequence[Client],
    tuners: Sequence[Client],
    recipe: Recipe | None = None,
    *,
    checkpoint: Path | None = None,
    progress: Progress = lambda what: None,
) -> Learned:
    """Rates of all modules.

    Args:
        model: the frozen model; its own rates are not used.
        spec: of its input.
        teachers: labelled source clients.
        tuners: other ones, which choose the learning rate and the round.
        recipe: how.
        checkpoint: written after every look at the tuning clients; if it is there, learning goes on from it.
        progress: told what is done after every client of a round.

    Raises:
        LearningError: the rates are not finite or make everything worse, with what to do; or the checkpoint is of
            another run.
    """
    recipe = recipe or Recipe()
    if not teachers or not tuners:
        raise LearningError("rates are learned from teaching clients and chosen by tuning clients; some are missing")
    run = _Run(model, spec, [_batches(c, spec, recipe.batch) for c in tuners], teachers, recipe, progress)
    name = _digest(model, teachers, tuners, recipe)
    learned = _resumed(checkpoint, name) if checkpoint else None
    if learned is None:
        zero = dict.fromkeys(model.modules, 0.0)
        frozen = run.loss(zero)
        tried = {recipe.lr: frozen} if recipe.lr is not None else run.search(frozen)
        lr = min(tried, key=lambda each: tried[each])
        learned = _State(rates=zero, best=zero, lr=lr, losses={0: frozen}, round=0, tried=tried)
    run.go_on(learned, lambda: _save(checkpoint, name, learned) if checkpoint else None)
    return Learned(learned.best, learned.lr, learned.losses, learned.round, tuple(learned.notes))


@dataclass(slots=True)
class _State:
    """What a run is at after a round."""

    rates: Rates
    best: Rates
    lr: float
    losses: dict[int, float]
    round: int
    tried: dict[float, float]  # learning rate -> loss after a few rounds
    notes: list[str] = field(default_factory=list)


class _Run:
    """One run of Algorithm 1."""

    def __init__(
        self,
        model: FrozenModel,
        spec: InputSpec,
        tuning: Sequence[Sequence[tuple[Tensor, Tensor]]],
        teachers: Sequence[Client],
        recipe: Recipe,
        progress: Progress,
    ) -> None:
        self._model, self._spec, self._tuning = model, spec, tuning
        self._teachers, self._recipe, self._progress = teachers, recipe, progress

    def search(self, frozen: float) -> dict[float, float]:
        """Learning rates that do not run away in a few rounds, and the loss on the tuning clients after them.

        From the first one upwards as long as that is better; if it never is, downwards.

        Args:
            frozen: loss of the frozen model on them.
        """
        found = {LADDER[FIRST]: self._tried(LADDER[FIRST])}
        for side in (LADDER[FIRST + 1 :], LADDER[FIRST - 1 :: -1]):
            for lr in side:
                best = min(found.values())
                found[lr] = self._tried(lr)
                if not found[lr] < best:
                    break
            if min(found, key=lambda lr: found[lr]) != LADDER[FIRST]:
                break
        if min(found.values()) > WORSE * frozen:
            raise LearningError(f"the rates run away with every learning rate tried; give --lr {LADDER[0] / 10:g}")
        return {lr: loss for lr, loss in found.items() if loss <= WORSE * frozen}

    def _tried(self, lr: float) -> float:
        """Loss on the tuning clients after the first rounds with a learning rate; infinite if the rates run away."""
        rates = dict.fromkeys(self._model.modules, 0.0)
        try:
            for number in range(1, self._recipe.search_rounds + 1):
                rates = self._round(rates, number, lr, f"lr {lr:g}")
        except LearningError:
            return math.inf
        return self.loss(rates)

    def go_on(self, state: _State, save: Callable[[], None]) -> None:
        """Rounds until the last, or until the tuning clients gain no more.

        What is looked at and kept is the mean of the rates since the last look: Algorithm 1 ends with those of the last
        round, which chance moves, the more the fewer clients a round has. If the rates run away with a learning rate
        that was found here, the best ones go on with the next best of those that are smaller.
        """
        recipe = self._recipe
        since: list[Rates] = []  # the last look
        while state.round < recipe.rounds:
            state.round += 1
            try:
                state.rates = self._round(state.rates, state.round, state.lr, f"round {state.round}")
                since.append(state.rates)
                if state.round % recipe.check_every and state.round < recipe.rounds:
                    continue
                mean, since = average(since), []
                loss = self._loss_after(state, mean)
            except LearningError:
                if recipe.lr is not None or state.lr < LADDER[0]:
                    raise
                self._fall_back(state)
                since = []
                save()
                continue
            if loss < min(state.losses.values()):
                state.best = mean
            state.losses[state.round] = loss
            save()
            best = min(state.losses, key=lambda number: state.losses[number])
            if state.round - best >= recipe.patience * recipe.check_every:
                break

    def _fall_back(self, state: _State) -> None:
        """Go on from the best rates so far with the next best of the smaller learning rates, else with a third."""
        given_up = state.lr
        smaller = {lr: loss for lr, loss in state.tried.items() if lr < given_up}
        state.lr = min(smaller, key=lambda lr: smaller[lr], default=given_up / 3)
        state.rates = state.best
        state.notes.append(
            f"the rates ran away with a learning rate of {given_up:g} in round {state.round}, and the best ones so far "
            f"went on with {state.lr:.2g}; --lr {state.lr:.2g} begins with it"
        )

    def _loss_after(self, state: _State, rates: Rates) -> float:
        """Loss on the tuning clients; raises LearningError if it is much worse than that of the frozen model."""
        loss = self.loss(rates)
        if not loss < WORSE * state.losses[0]:
            raise LearningError(
                f"after {state.round} rounds with a learning rate of {state.lr:g} the adapted model is worse than "
                f"the frozen one (cross-entropy {loss:.3g}, {state.losses[0]:.3g}); give --lr {state.lr / 3:.2g}"
            )
        return loss

    def loss(self, rates: Mapping[str, float]) -> float:
        """Mean cross-entropy of the tuning clients, each batch adapted alone (Eq. 6); infinite if it is not finite."""
        total, rows = 0.0, 0
        used = {name: rate for name, rate in rates.items() if rate != 0}
        for client in self._tuning:
            for x, labels in client:
                h = direction(self._model, x, tuple(used)).tensors if used else {}
                logits = self._model.forward(x, adapt(self._model, h, used)[0] if used else {})
                total += float(F.cross_entropy(logits, labels.to(logits.device), reduction="sum"))
                rows += len(labels)
        return total / rows if math.isfinite(total) else math.inf

    def _round(self, rates: Rates, number: int, lr: float, what: str) -> Rates:
        """ServerTrain, lines 3 to 6: the cohort's clients refine the rates, the server takes their mean."""
        draw = np.random.default_rng([self._recipe.seed, number])
        size = min(self._recipe.cohort or len(self._teachers), len(self._teachers))
        cohort = draw.choice(len(self._teachers), size, replace=False)
        local = []
        for index in sorted(cohort.tolist()):
            local.append(self._client(rates, self._teachers[index], lr, draw))
            self._progress(what)
        mean = average(local)
        if not all(map(math.isfinite, mean.values())):
            raise LearningError(
                f"the rates are not finite in round {number} with a learning rate of {lr:g}; give --lr {lr / 3:.2g}"
            )
        return mean

    def _client(self, rates: Rates, client: Client, lr: float, draw: np.random.Generator) -> Rates:
        """ClientTrain: the rates after all batches of one client, in a new order in every epoch."""
        found = rates
        for _ in range(self._recipe.epochs):
            order = draw.permutation(len(client.labels))
            shuffled = Client(client.name, client.images[order], client.labels[order], client.shift, client.kind)
            for x, labels in _batches(shuffled, self._spec, self._recipe.batch):
                found = refine(self._model, found, x, labels, lr)
        return found


def _batches(client: Client, spec: InputSpec, size: int) -> list[tuple[Tensor, Tensor]]:
    x, labels = spec.normalise(client.images), torch.from_numpy(client.labels)
    return [(a, b) for a, b in zip(torch.split(x, size), torch.split(labels, size), strict=True) if len(b) > 1]


def _digest(model: FrozenModel, teachers: Sequence[Client], tuners: Sequence[Client], recipe: Recipe) -> str:
    """What a checkpoint is of: model, clients and recipe, but for the number of rounds, which may grow."""
    told = {**asdict(recipe), "rounds": 0, "model": model.content_hash}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for client in (*teachers, *tuners):
        digest.update(client.images.tobytes() + client.labels.tobytes())
    return digest.hexdigest()


def _save(path: Path, name: str, state: _State) -> None:
    """Write a checkpoint whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps({"run": name, **asdict(state)}))
    os.replace(part, path)


def _resumed(path: Path, name: str) -> _State | None:
    if not path.exists():
        return None
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        run = told.pop("run")
        state = _State(**told)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LearningError(f"{path} is no checkpoint of learning; delete it or name another --checkpoint") from error
    if run != name:
        raise LearningError(f"{path} is the checkpoint of another run: other model, data or options; name another one")
    state.losses = {int(number): loss for number, loss in state.losses.items()}
    state.tried = {float(lr): loss for lr, loss in state.tried.items()}
    return state
