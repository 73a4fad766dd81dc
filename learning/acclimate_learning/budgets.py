"""How few bytes the stored states of an adapter may take, found on clients that tune and do not judge."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from acclimate_adapters import Adapter, FrozenModel, create
from acclimate_adapters.compression.coding import decode, encode
from acclimate_adapters.compression.sensitivity import Tolerant, sensitivity
from acclimate_learning.clients import Client
from acclimate_learning.judging import BATCH
from acclimate_store import InputSpec
from acclimate_store.manifest import StateBudget

Progress = Callable[[], None]
EXACT: Final = 1.0
LADDER: Final = tuple(2.0 ** (-step / 2) for step in range(23))
"""Shares of the exact bytes that are tried, from all of them to 1/2048, each of which takes 71 % of the one before."""
MOST_OTHER: Final = 0.003
"""Share of all answers that may differ from those of exact states."""
MOST_LOST: Final = 0.0005
"""Accuracy that may be lost."""


FEWEST_ROWS: Final = 2000
"""Answers below which a single one that is wrong would be more accuracy than may be lost."""


class Followed(NamedTuple):
    """The classes that clients were answered with, one client after another, and the mean bytes of their states."""

    answers: Tensor
    nbytes: float


def choose_budget(
    model: FrozenModel,
    spec: InputSpec,
    clients: Sequence[Client],
    adapter: str,
    of: str,
    options: Mapping[str, Any] | None = None,
    progress: Progress = lambda: None,
) -> StateBudget | None:
    """The least budget that keeps the answers of exact states.

    None where the bytes of an adapter's states do not depend on it, and where the clients have too few images to show
    anything.

    Budgets are halved in on, from the largest to the least: what a budget spoils, a smaller one spoils as well.

    Args:
        model: the frozen model.
        spec: of its input.
        clients: with their labels, which the adapter does not see.
        adapter: its name.
        of: what the clients are, in words.
        options: its hyper-parameters.
        progress: called after each client.
    """
    method = create(adapter, **(options or {}))
    weights = sensitivity(method, model)
    fixed = not isinstance(method, Tolerant) or (weights and all(map(math.isinf, weights.values())))
    if fixed or sum(len(client.labels) for client in clients) < FEWEST_ROWS:
        return None
    exact = follow(method, model, spec, clients, EXACT, progress)
    labels = torch.from_numpy(np.concatenate([client.labels for client in clients]))
    right = float((exact.answers == labels).double().mean())

    @lru_cache
    def found(step: int) -> StateBudget:
        budget = LADDER[step]
        rounded = exact if budget == EXACT else follow(method, model, spec, clients, budget, progress)
        return StateBudget(
            budget=budget,
            nbytes=rounded.nbytes,
            other=float((rounded.answers != exact.answers).double().mean()),
            lost=right - float((rounded.answers == labels).double().mean()),
            of=of,
        )

    good, bad = 0, len(LADDER)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if keeps(found(middle)) else (good, middle)
    return found(good)


def keeps(budget: StateBudget) -> bool:
    """Whether answers stay what they are with exact states, but for what nobody would notice."""
    return budget.other <= MOST_OTHER and budget.lost <= MOST_LOST


def follow(
    method: Adapter,
    model: FrozenModel,
    spec: InputSpec,
    clients: Sequence[Client],
    budget: float,
    progress: Progress = lambda: None,
) -> Followed:
    """Answer clients whose states are stored and restored after every batch, which is the worst case."""
    weights, answers, sizes = sensitivity(method, model), [], []
    for client in clients:
        data = encode(method.init(model), budget, weights)
        for batch in torch.split(spec.normalise(client.images).to(model.device), BATCH):
            step = method.step(model, decode(data), batch)
            data = encode(step.state, budget, weights)
            answers.append(step.logits.argmax(1).cpu())
        sizes.append(len(data))
        progress()
    return Followed(torch.cat(answers), float(np.mean(sizes)))
