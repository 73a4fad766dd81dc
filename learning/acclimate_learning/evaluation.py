"""What `acclimate evaluate` found: who gains, who is harmed, what a few labels make of it, and what to choose."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from acclimate_learning.asked import PORTFOLIO, RUNS, Asked
from acclimate_learning.clients import Client
from acclimate_learning.judging import Judgement
from acclimate_store import Manifest
from acclimate_store.manifest import HARM, SAFEST, Evidence


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Adapters that were judged on the streams of the same clients.

    Args:
        manifest: of the bundle.
        of: what the clients were, in words.
        clients: their streams.
        judged: what each adapter did.
        asked: what labels made of adapters, for each budget; empty if nobody wanted to know.
        portfolio: what the portfolio did without a label, whose arms `asked` chose from; None without arms.
    """

    manifest: Manifest
    of: str
    clients: Sequence[Client]
    judged: Sequence[Judgement]
    asked: Sequence[Asked] = field(default=())
    portfolio: Judgement | None = None

    @cached_property
    def evidence(self) -> list[Evidence]:
        """The record of the gain of each adapter, in the order of `judged`."""
        return [each.evidence(self.of) for each in self.judged]

    @property
    def by_gain(self) -> list[tuple[Judgement, Evidence]]:
        """Both, the largest gain first."""
        return sorted(zip(self.judged, self.evidence, strict=True), key=lambda pair: -pair[1].gain)

    @property
    def recommended(self) -> Evidence | None:
        """The adapter with the largest gain among those that gain for certain and hardly harm."""
        return max((each for each in self.evidence if not each.obstacle), key=lambda each: each.gain, default=None)

    @property
    def refuted(self) -> Evidence | None:
        """Of those that gain nothing for certain the safest one, else the best."""
        safest = next((each for each in self.evidence if each.adapter == SAFEST), None)
        return safest or max(self.evidence, key=lambda each: each.gain, default=None)

    @property
    def oracle(self) -> NDArray[np.float64]:
        """Accuracy of each client, [clients], under what is best for it of all judged and none; known afterwards."""
        best: NDArray[np.float64] = np.max([self.judged[0].frozen, *(each.accuracy for each in self.judged)], axis=0)
        return best

    def verdict(self) -> str:
        """What to choose, in a sentence."""
        if self.recommended is None:
            return "recommended: none; no adapter gains for certain without harming clients"
        return f"recommended: {self.recommended.adapter}, {in_words(self.recommended)}"

    def table(self) -> str:
        """What is printed."""
        if not self.judged:
            key = self.manifest.key
            return f"{key} has everything for no adapter; run `acclimate models measure` and `acclimate learn`"
        frozen = self.judged[0].frozen
        lines = [
            f"{self.manifest.key}: frozen {100 * frozen.mean():.2f} % on {len(frozen)} clients",
            f"{'adapter':<18} {'accuracy':>8} {'gain':>6} {'95 % interval':>15} {'worst':>6} {'harmed':>7} "
            f"{'step':>9} {'state':>9}",
        ]
        for told, found in self.by_gain:
            between = f"{100 * found.low:+.1f} to {100 * found.high:+.1f}"
            lines.append(
                f"{told.adapter:<18} {100 * told.accuracy.mean():>8.2f} {100 * found.gain:>+6.1f} {between:>15} "
                f"{100 * found.worst:>+6.1f} {100 * found.harmed:>5.0f} % {told.step_ms:>6.1f} ms "
                f"{told.state_bytes / 1e3:>6.1f} kB"
                + (f"  failed for {told.failures} clients" if told.failures else "")
            )
        return "\n".join([*lines, self.verdict(), *self._with_labels()])

    def _with_labels(self) -> list[str]:
        """Lines of the portfolio, and of the adapter that is recommended, else of the best one."""
        if not self.asked:
            return []
        best = self.recommended or max(self.evidence, key=lambda each: each.gain)
        named = {PORTFOLIO: PORTFOLIO, best.adapter: f"{best.adapter}, guarded"}
        lines = [
            f"with the labels that the service asks for, mean of {RUNS} runs"
            + (f"; a step of the portfolio {_cost(self.portfolio)}:" if self.portfolio else ":"),
            f"{'budget':>6} {'spent':>6} {'adapter':<27} {'accuracy':>8} {'gain':>6} {'worst':>6} {'harmed':>7}",
        ]
        for each in sorted((each for each in self.asked if each.adapter in named), key=lambda each: each.share):
            lines.append(
                f"{100 * each.share:>4.3g} % {100 * each.spent:>4.1f} % {named[each.adapter]:<27} "
                f"{100 * each.accuracy.mean():>8.2f} {100 * each.gain:>+6.1f} {100 * each.worst:>+6.1f} "
                f"{100 * each.harmed:>5.1f} %"
            )
        gain = float((self.oracle - self.judged[0].frozen).mean())
        of_all = f"{100 * self.oracle.mean():>8.2f} {100 * gain:>+6.1f}"
        return [*lines, f"{'':>13} {'best adapter of each client':<27} {of_all}  known only afterwards"]

    def figures(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        return {
            "clients": [
                {"name": client.name, "shift": client.shift, "images": len(client.labels)} for client in self.clients
            ],
            "adapters": [
                {
                    **found.model_dump(),
                    "accuracy": told.accuracy.tolist(),
                    "frozen": told.frozen.tolist(),
                    "step_ms": told.step_ms,
                    "state_bytes": told.state_bytes,
                    "failures": told.failures,
                }
                for told, found in zip(self.judged, self.evidence, strict=True)
            ],
            **(self._figures_with_labels() if self.asked else {}),
        }

    def _figures_with_labels(self) -> dict[str, Any]:
        told = self.portfolio
        return {
            "asked": [each.figures() for each in self.asked],
            "oracle": {"accuracy": self.oracle.tolist()},
            "portfolio": {"step_ms": told.step_ms, "state_bytes": told.state_bytes} if told else None,
        }


def _cost(told: Judgement) -> str:
    return f"takes {told.step_ms:.1f} ms, its state {told.state_bytes / 1e3:.1f} kB"


def in_words(evidence: Evidence) -> str:
    """Gain and harm of one adapter."""
    low, high = (f"{100 * value:+.1f}" for value in (evidence.low, evidence.high))
    return (
        f"{100 * evidence.gain:+.1f} points over frozen (95 %: {low} to {high}), worst client "
        f"{100 * evidence.worst:+.1f}, {100 * evidence.harmed:.0f} % harmed by more than {100 * HARM:.0f}"
    )
