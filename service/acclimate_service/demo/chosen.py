"""One method that helps one client and harms another: `portfolio` answers each of them by its labels.

Both are followed by the method and answered by it, or by the frozen model, as labels prefer. The one that gains tells
its labels first, and they speak for the method; so the other begins with it. Beside it a client that has the method
alone is sent the same images: its guard needs a proof, where a choice needs a lead. Of both, all those images are
labelled that the service asks for.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from acclimate_service.demo.caller import Answer, Caller
from acclimate_store.samples import ClientStream

_GAINING: Final = "gaining"
_ALONE: Final = "guarded-alone"
_NOTHING: Final = {"labelled": 0, "verdict": "undecided"}
_HEADER: Final = "batch  frozen  guarded  portfolio    answered by    labels"


@dataclass(frozen=True, slots=True)
class Choice:
    """How a batch was answered, and what was known once its labels were told.

    Args:
        number: of the batch, from 1.
        frozen, guarded, portfolio: accuracy of the three clients' answers to it, in percent.
        arm: which one answered the portfolio's client: 0, the frozen model, or 1, the method.
        labels: told of that client so far.
        verdict: of the guarded client, which has the method alone: "undecided", "harmful" or "trusted".
        tested: labels told of that one so far.
    """

    number: int
    frozen: float
    guarded: float
    portfolio: float
    arm: int
    labels: int
    verdict: str
    tested: int


def choose(caller: Caller, method: str, gains: ClientStream, loses: ClientStream, size: int) -> Iterator[Choice]:
    """Send the stream of a client that gains, and then, in batches of `size`, that of one that loses."""
    caller.configure(_GAINING, "portfolio", {"arms": [method]})
    for images, labels in _batches(gains, size):
        _tell(caller, _GAINING, caller.predict(_GAINING, images), labels)
    caller.configure("frozen", "none", {})
    caller.configure(_ALONE, method, {})
    caller.configure("portfolio", "portfolio", {"arms": [method]})
    alone = chosen = dict[str, Any](_NOTHING)
    for number, (images, labels) in enumerate(_batches(loses, size), start=1):
        frozen, guarded, portfolio = (caller.predict(name, images) for name in ("frozen", _ALONE, "portfolio"))
        alone = alone | _tell(caller, _ALONE, guarded, labels)
        chosen = chosen | _tell(caller, "portfolio", portfolio, labels)
        yield Choice(
            number,
            frozen=_accuracy(frozen, labels),
            guarded=_accuracy(guarded, labels),
            portfolio=_accuracy(portfolio, labels),
            arm=int(portfolio.signals["arm"]),
            labels=chosen["labelled"],
            verdict=alone["verdict"],
            tested=alone["labelled"],
        )


def _batches(stream: ClientStream, size: int) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    for start in range(0, len(stream.images), size):
        yield stream.images[start : start + size], stream.labels[start : start + size]


def _accuracy(answer: Answer, labels: NDArray[np.int64]) -> float:
    return 100 * float(np.mean(answer.indices == labels))


def _tell(caller: Caller, client: str, answer: Answer, labels: NDArray[np.int64]) -> dict[str, Any]:
    return dict(caller.feedback(client, answer, {row: int(labels[row]) for row in answer.ask})) if answer.ask else {}


def lines(choices: Iterable[Choice], method: str) -> Iterator[str]:
    """The table, line by line as the batches are answered; a rule stands where a verdict is reached."""
    yield _HEADER
    yield "-" * len(_HEADER)
    verdict = "undecided"
    for c in choices:
        by = method if c.arm else "frozen"
        yield f"{c.number:5}  {c.frozen:6.0f}  {c.guarded:7.0f}  {c.portfolio:9.0f}    {by:<11}    {c.labels:6}"
        if c.verdict != verdict:
            verdict = c.verdict
            yield f" {verdict}, by {c.tested} labels ".center(len(_HEADER), "-")


def conclusion(choices: Sequence[Choice], method: str) -> str:
    """How many labels a choice took, and how many a proof that it was right."""
    left = next((place for place, each in enumerate(choices) if not each.arm), None)
    if not left:  # it began with the frozen model, or never left the method
        return f"{method} was {'never chosen' if left == 0 else f'kept, by {choices[-1].labels} labels'}."
    frozen, guarded, portfolio = (
        np.mean([getattr(each, name) for each in choices[left:]]) for name in ("frozen", "guarded", "portfolio")
    )
    proof = next((f"took {each.tested}" for each in choices if each.verdict == "harmful"), None)
    return (
        f"{choices[left - 1].labels} labels were enough to choose another answer; "
        f"a proof that {method} harms this client\n"
        f"{proof or f'needs more than {choices[-1].tested}'}. Accuracy in the {len(choices) - left} batches since: "
        f"frozen {frozen:.1f} %, guarded {guarded:.1f} %, portfolio {portfolio:.1f} %."
    )
