"""One client that adaptation harms, three times over: frozen, adapted, and guarded by a few true labels.

The three are clients of one service and send it the same images. Nobody tells what those of the first two were. Of the
third's, those are labelled that the service asks for, all of them: whether a label is told must not depend on which
answer is right.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from acclimate_service.demo.caller import Caller
from acclimate_store.samples import ClientStream

GUARDED: Final = "guarded"
"""Name of the client whose labels are told."""
_CLIENTS: Final = ("frozen", "adapted", GUARDED)
_HEADER: Final = "batch  frozen  adapted  guarded    labels  wins  losses"


@dataclass(frozen=True, slots=True)
class Moment:
    """How a batch was answered, and what was known once its labels were told.

    Args:
        number: of the batch, from 1.
        frozen, adapted, guarded: accuracy of the three clients' answers to it, in percent.
        caught: whether the guarded client was given the frozen model's answer.
        labels: told so far.
        wins, losses: of them, those that only the adapted, only the frozen prediction has right.
        verdict: "undecided", "harmful" or "trusted".
    """

    number: int
    frozen: float
    adapted: float
    guarded: float
    caught: bool
    labels: int
    wins: int
    losses: int
    verdict: str


def follow(
    caller: Caller, stream: ClientStream, adapter: str, hyperparameters: Mapping[str, Any], size: int
) -> Iterator[Moment]:
    """Send a stream in batches of `size` to the three clients, and tell the labels of one of them."""
    caller.configure("frozen", "none", {})
    caller.configure("adapted", adapter, hyperparameters)
    caller.configure(GUARDED, adapter, hyperparameters)
    seen: Mapping[str, Any] = {"labelled": 0, "wins": 0, "losses": 0, "verdict": "undecided"}
    for number, start in enumerate(range(0, len(stream.images), size), start=1):
        images, labels = stream.images[start : start + size], stream.labels[start : start + size]
        answers = {name: caller.predict(name, images) for name in _CLIENTS}
        right = {name: 100 * float(np.mean(one.indices == labels)) for name, one in answers.items()}
        answer = answers[GUARDED]
        if answer.ask:
            seen = caller.feedback(GUARDED, answer, {row: int(labels[row]) for row in answer.ask})
        yield Moment(
            number,
            **right,
            caught=answer.status == "guarded",
            labels=seen["labelled"],
            wins=seen["wins"],
            losses=seen["losses"],
            verdict=seen["verdict"],
        )


def lines(moments: Iterable[Moment]) -> Iterator[str]:
    """The table, line by line as the batches are answered; a rule stands wherever the verdict changes."""
    yield _HEADER
    yield "-" * len(_HEADER)
    verdict = "undecided"
    for m in moments:
        yield (
            f"{m.number:5}  {m.frozen:6.0f}  {m.adapted:7.0f}  {m.guarded:7.0f}"
            f"    {m.labels:6}  {m.wins:4}  {m.losses:6}"
        )
        if m.verdict != verdict:
            verdict = m.verdict
            yield f" {verdict} ".center(len(_HEADER), "-")


def conclusion(moments: Sequence[Moment]) -> str:
    """What the labels were good for, in a sentence."""
    after = [m for m in moments if m.caught]
    if not after:
        return f"{moments[-1].labels} labels gave no reason to answer by the frozen model."
    frozen, adapted, guarded = (np.mean([getattr(m, name) for m in after]) for name in _CLIENTS)
    return (
        f"{moments[after[0].number - 2].labels} labels were enough. Accuracy in the {len(after)} batches since: "
        f"frozen {frozen:.1f} %, adapted {adapted:.1f} %, guarded {guarded:.1f} %."
    )
