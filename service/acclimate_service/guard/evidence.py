"""What true labels say about adapted against frozen predictions, at any time and in any order.

A labelled row is a win (only the adapted prediction is right), a loss (only the frozen one is) or a tie. Adaptation is
harmful where losses are likelier than wins. The test is Robbins' mixture: bet on every win or loss at even odds, with
all stakes u from 0 to 1 at once, uniformly mixed. The capital is an e-process. It depends on the counts alone, so the
evidence of several clients adds up and labels may arrive late.

Why it may be looked at after every label: let win or loss i be a win with any chance p_i, which may depend on all rows
before. Betting u on losses multiplies the capital by 1 - u after a win and by 1 + u after a loss. With
e^t = (1 - u) / (1 + u), hence t <= 0, x_i = 1 for a win and 0 for a loss, and S = sum x_i wins among n, it is

    e^(t S) / ((1 + e^t) / 2)^n  <=  prod_i e^(t x_i) / (1 - p_i + p_i e^t)    while mean(p_1 .. p_n) >= 1/2,

since log(1 - p + p e^t) is concave in p and falls. The right side is a martingale that starts at 1, and so is its
mixture over u. By Ville's inequality the chance that it ever reaches 1 / alpha is at most alpha. So, however often one
looks: with probability 1 - alpha at least, the verdict is never "harmful" while the chance of a win, averaged over the
wins and losses that it judges, is 1/2 or more; and in the same way never "trusted" while it is 1/2 or less. Each side
has an alpha of its own: where wins and losses are equally likely throughout, either mistake happens with a chance of
at most 2 alpha.

Needed for this: neither whether nor when a row's label is told depends on which prediction is right. It may depend on
all else: on the predictions, on lots, on what was told before. So rows may be asked for in which the two differ, and as
long as it pays: p_i is then the chance of a win among the rows asked, given all that was known when they were. Whoever
asks must not know more of the labels than that, and who answers must not answer by what the label is.

What is shown beside verdicts, the accuracy of either prediction over all rows, does depend on how rows were chosen:
those that were asked for (`Counts.asked`) are ones in which the answers in play differ. So each labelled row is
weighted by the inverse of the chance that a row like it was labelled, as what was labelled estimates it: with w the
share of rows in which the two predictions differ, the accuracy is w times that of the labelled rows in which they do,
whoever chose them, and 1 - w times that of the others that nobody asked for; w itself is taken of the rows that nobody
asked for (Hájek's weights, or post-stratification). Assumed is, beside the above, that of the rows which nobody asked
for a random sample is labelled. They lack those that were asked for, so w is too small by that share of all rows at
most.

The fleet (`Pooled`). What one client tells must not decide for the others. So each counts with its first `WEIGHT`
labelled rows, and a verdict has to stand whichever `needed - 1` clients are left out: from the losses are taken those
of the `needed - 1` clients with the most, while all wins stay, and the other way round for "trusted". At least `needed`
clients therefore have rows that speak for it. What is guaranteed: fewer than `needed` clients may tell whatever they
like, knowing all that happened; with probability 1 - alpha at least, the verdict is never "harmful" while the chance of
a win, averaged over the counted wins and losses of the other clients, is 1/2 or more; "trusted" alike. Proof: let f
losses and c wins be counted, f' and c' of them of the others. The ones who lie have no more losses than the needed - 1
clients with the most, whose number is m: f - m <= f'. And c >= c'. The capital E grows with losses and falls with wins,
so E(f - m, c) <= E(f', c'), which reaches 1 / alpha with a chance of at most alpha, as above. That only the first rows
of a client count takes nothing away: a row's place is known before its label. Where more rows come at once than still
count, they are drawn by lot, which does not look at them either.

Assumed for the fleet, beside the above: liars have fewer than `needed` client ids; and clients are deleted, or told
nothing for so long that their share expires, for reasons that have nothing to do with which prediction was right. A
departure takes rows away, after which those left are no longer what was looked at before: the chance of a wrong verdict
is at most alpha between any two departures, however often one looks, not over endlessly many of them.

References:
    Ville, Étude critique de la notion de collectif, 1939.
    Robbins, Statistical methods related to the law of the iterated logarithm, Ann. Math. Stat. 41(5), 1970.
    Hájek, comment in Foundations of Statistical Inference, 1971: weights that are normalised by their sum.
    Howard, Ramdas, McAuliffe, Sekhon, Time-uniform, nonparametric, nonasymptotic confidence sequences, Ann. Stat.
    49(2), 2021: sub-Bernoulli processes and their one-sided beta mixture, of which the uniform one is a case.
    Waudby-Smith, Ramdas, Estimating means of bounded random variables by betting, JRSS B 86(1), 2024: the intervals.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal, NamedTuple, Self, TypeAlias

import numpy as np

ALPHA: Final = 0.05
WEIGHT: Final = 32
"""Labelled rows of one client that count for the fleet."""
LEAD_WEIGHT: Final = 4
"""Wins and losses of one client that count for who leads in a fleet without a verdict, in proportion if it has more."""
LEAD: Final = 0.5
"""Wins that adaptation must be ahead by, in standard deviations that the difference to the losses has by chance. Harm
may grow over a stream, which past labels do not tell; so what is hardly better is given up."""
CLIENTS: Final = 5
"""Clients that have to agree before anything follows for the others."""
Answer: TypeAlias = Literal["adapted", "frozen"]
Verdict: TypeAlias = Literal["trusted", "undecided", "harmful"]

_KINDS: Final = 5
_HALVINGS = 40
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(200)
_REACH = 40.0  # of the quadrature to both sides of the peak, in standard deviations


@dataclass(frozen=True, slots=True)
class Counts:
    """Labelled rows by which prediction was right; all the evidence there is.

    Args:
        wins: rows that only the adapted prediction has right.
        losses: rows that only the frozen prediction has right.
        labelled: all rows whose label is known.
        frozen_right: rows that the frozen prediction has right.
        adapted_right: rows that the adapted prediction has right.
        astray: rows in which both are wrong, and differ.
        asked: of all these, rows whose labels were asked for, by `kinds`; empty if there are none.

    Raises:
        ValueError: numbers that no set of rows can have.
    """

    wins: int = 0
    losses: int = 0
    labelled: int = 0
    frozen_right: int = 0
    adapted_right: int = 0
    astray: int = 0
    asked: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        both = self.adapted_right - self.wins
        neither = self.labelled - both - self.wins - self.losses
        sound = min(self.wins, self.losses, both, self.astray) >= 0 and self.astray <= neither
        if not sound or self.frozen_right != both + self.losses or min(self.kinds) < 0:
            raise ValueError(
                f"{self} contradict each other; accepted are counts >= 0 with adapted_right - wins = frozen_right - "
                "losses >= 0 and adapted_right + losses + astray <= labelled, and no more rows asked than there are"
            )

    @classmethod
    def of(cls, frozen: int, adapted: int, label: int, *, asked: bool = False) -> Self:
        """One row, by its two predicted classes and its true one, and whether its label was asked for."""
        f, a = int(frozen == label), int(adapted == label)
        astray = int(frozen != adapted and f == a == 0)
        of = cls(wins=int(a > f), losses=int(f > a), labelled=1, frozen_right=f, adapted_right=a, astray=astray)
        return replace(of, asked=of.kinds[:_KINDS]) if asked else of

    @property
    def kinds(self) -> tuple[int, ...]:
        """Unasked rows: wins, losses, both right, both wrong alike, both astray; then asked ones in the same order."""
        both = self.adapted_right - self.wins
        alike = self.labelled - self.wins - self.losses - both - self.astray
        every, asked = (self.wins, self.losses, both, alike, self.astray), self.asked or (0,) * _KINDS
        return (*(number - each for number, each in zip(every, asked, strict=True)), *asked)

    @classmethod
    def of_kinds(cls, kinds: Sequence[int]) -> Self:
        """Those of which there are so many of each of the `kinds`; the last ones may be left out if there are none."""
        padded = (*kinds, *(0,) * (2 * _KINDS - len(kinds)))
        asked = padded[_KINDS:]
        every = [number + each for number, each in zip(padded[:_KINDS], asked, strict=True)]
        wins, losses, both, _, astray = every
        return cls(wins, losses, sum(every), both + losses, both + wins, astray, asked if any(asked) else ())

    def __add__(self, other: Self) -> Self:
        return self.of_kinds([one + another for one, another in zip(self.kinds, other.kinds, strict=True)])


@dataclass(frozen=True, slots=True)
class Pooled:
    """The evidence of all clients of one configuration.

    Args:
        clients: the counted rows of each client that told labels, at most `WEIGHT` each.
        needed: clients that have to agree; at least 1.
    """

    clients: tuple[Counts, ...] = ()
    needed: int = CLIENTS

    @property
    def counts(self) -> Counts:
        """The rows of all clients."""
        return sum(self.clients, Counts())

    def verdict(self, alpha: float = ALPHA) -> Verdict:
        """What stands whichever `needed - 1` clients are left out; see the module for what is guaranteed.

        Raises:
            ValueError: alpha out of range.
        """
        threshold, counts = _needed(alpha), self.counts
        losses = counts.losses - self._most([each.losses for each in self.clients])
        if log_evidence(losses, counts.wins) >= threshold:
            return "harmful"
        wins = counts.wins - self._most([each.wins for each in self.clients])
        return "trusted" if log_evidence(wins, counts.losses) >= threshold else "undecided"

    @property
    def behind(self) -> bool:
        """Whether adaptation lacks the lead that is asked of it, and `needed` clients agree that it is not ahead.

        This is no proof, and nothing is guaranteed of it. One client moves the lead by `LEAD_WEIGHT` rows at most.
        """
        lead = variance = 0.0
        for each in self.clients:
            rows = each.wins + each.losses
            share = min(1.0, LEAD_WEIGHT / rows) if rows else 0.0
            lead, variance = lead + share * (each.wins - each.losses), variance + share**2 * rows
        agreeing = sum(each.wins <= each.losses for each in self.clients)
        return agreeing >= self.needed and lead < LEAD * math.sqrt(variance)

    def _most(self, rows: list[int]) -> int:
        """How many rows those clients have that would be missed most."""
        return sum(sorted(rows, reverse=True)[: self.needed - 1])


class Interval(NamedTuple):
    """An estimate between two bounds, each of which is never wrong, at any time, with probability 1 - alpha."""

    estimate: float | None  # None without a labelled row
    low: float
    high: float


def log_evidence(favourable: int, contrary: int) -> float:
    """Logarithm of the e-value against "favourable outcomes are no likelier than contrary ones".

    The likelihood ratio of a chance p of favourable outcomes to 1/2, averaged over p = (1 + u) / 2 from 1/2 to 1. With
    f favourable and c contrary outcomes, B the beta function and I the regularised incomplete one:

        E(f, c) = int_0^1 (1 + u)^f (1 - u)^c du = 2^(f + c + 1) B(f + 1, c + 1) I_1/2(c + 1, f + 1)

    For f <= c by the hypergeometric series of I (DLMF 8.17.8 and 15.8.1), whose terms are positive and fall; otherwise
    by E(f, c) + E(c, f) = 2^(f + c + 1) B(f + 1, c + 1). Absolute error below 1e-7 for counts up to 10^6.

    Args:
        favourable: wins to show that adaptation helps, losses to show that it harms; >= 0.
        contrary: the others; >= 0.

    Returns:
        At least -log(contrary + 1), at most favourable log(2).
    """
    if favourable <= contrary:
        return math.log(_falling_series(favourable, contrary) / (contrary + 1))
    both = (favourable + contrary + 1) * math.log(2) + _log_beta(favourable + 1, contrary + 1)
    return both + math.log1p(-math.exp(log_evidence(contrary, favourable) - both))


@lru_cache(4096)  # every batch asks, and counts change with labels only
def verdict(counts: Counts, alpha: float = ALPHA) -> Verdict:
    """What the counts say now; more counts can turn it.

    Args:
        counts: of one client.
        alpha: 0 to 1, exclusive; chance of ever being wrong, for "harmful" and for "trusted" alike (see the module).

    Raises:
        ValueError: alpha out of range.
    """
    needed = _needed(alpha)
    if log_evidence(counts.losses, counts.wins) >= needed:
        return "harmful"
    return "trusted" if log_evidence(counts.wins, counts.losses) >= needed else "undecided"


def accuracy(counts: Counts, answer: Answer, alpha: float = ALPHA) -> Interval:
    """Accuracy of the frozen or of the adapted predictions over all rows, 0..1, if they are equally hard throughout.

    Where rows were asked for, labelled rows are weighted by how they were chosen (see the module): the share of rows in
    which both differ, and the accuracies there and elsewhere, are bounded with alpha / 3 each. The estimate is None
    where nobody told a label unasked.

    Raises:
        ValueError: alpha out of range.
    """
    right = counts.adapted_right if answer == "adapted" else counts.frozen_right
    if not counts.asked:
        return _share(right, counts.labelled, alpha)
    wins, losses, both, alike, astray, *_ = counts.kinds
    unasked, where_differing = wins + losses + astray, counts.wins if answer == "adapted" else counts.losses
    share = _share(unasked, unasked + both + alike, alpha / 3)
    there = _share(where_differing, counts.wins + counts.losses + counts.astray, alpha / 3)
    elsewhere = _share(both, both + alike, alpha / 3)
    low = min(w * there.low + (1 - w) * elsewhere.low for w in share[1:])
    high = max(w * there.high + (1 - w) * elsewhere.high for w in share[1:])
    if share.estimate is None:
        return Interval(None, low, high)
    # where none of the rows is of a kind, it has no weight
    estimate = share.estimate * (there.estimate or 0.0) + (1 - share.estimate) * (elsewhere.estimate or 0.0)
    return Interval(estimate, low, high)


def gain(counts: Counts, alpha: float = ALPHA) -> Interval:
    """Accuracy of the adapted minus that of the frozen predictions, -1..1, if it is the same throughout.

    Inverts the test of `verdict`: `low` is above 0 where that says "trusted", `high` below 0 where it says "harmful".

    Raises:
        ValueError: alpha out of range.
    """
    return _mean(counts.wins, counts.losses, counts.labelled - counts.wins - counts.losses, alpha)


def _needed(alpha: float) -> float:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}; accepted is a probability between 0 and 1, such as 0.05")
    return -math.log(alpha)


def _falling_series(favourable: int, contrary: int) -> float:
    """Sum over i of prod_{j <= i} (f - j + 1) / (c + 1 + j), to double precision; about 6 sqrt(f) terms at most."""
    total = term = 1.0
    for j in range(1, favourable + 1):
        term *= (favourable - j + 1) / (contrary + 1 + j)
        total += term
        if term < 1e-17 * total:
            break
    return total


def _log_beta(a: int, b: int) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _share(some: int, rows: int, alpha: float) -> Interval:
    """What share of rows are such, from how many of those were."""
    interval = _mean(some, rows - some, 0, alpha)
    return Interval(some / rows if rows else None, (1 + interval.low) / 2, (1 + interval.high) / 2)


def _mean(ups: int, downs: int, ties: int, alpha: float) -> Interval:
    """Mean of an outcome that is 1, -1 or 0, from how often it was each."""
    total, needed = ups + downs + ties, _needed(alpha)
    low, high = _lower_bound(ups, downs, ties, needed), -_lower_bound(downs, ups, ties, needed)
    return Interval((ups - downs) / total if total else None, low, high)


def _lower_bound(ups: int, downs: int, ties: int, needed: float) -> float:
    """Largest mean that the bets of `_log_capital` refute."""
    if ups + ties == 0:
        return -1.0
    estimate = (ups - downs) / (ups + downs + ties)
    return _last(lambda mean: _log_capital(ups, downs, ties, mean) >= needed, -1.0, estimate)


def _log_capital(ups: int, downs: int, ties: int, mean: float) -> float:
    """Logarithm of the capital won by betting that the mean is larger than `mean`; at 0 the same as `log_evidence`.

    With a stake u, an outcome x multiplies the capital by 1 + u (x - mean) / (1 + mean): by 1 on average if that is the
    mean of the outcomes (the capital process of Waudby-Smith and Ramdas). Each factor falls as `mean` grows, so one
    bound separates the means that are refuted. The stakes are mixed uniformly over 0..1; the quadrature spans the
    peak, and what it leaves out only makes the bounds wider.
    """
    bets = ((ups, (1 - mean) / (1 + mean)), (downs, -1.0), (ties, -mean / (1 + mean)))

    def slope(u: float) -> float:
        return sum(n * r / (1 + u * r) for n, r in bets)

    peak = _last(lambda u: slope(u) > 0, 0.0, 1.0)
    curvature = sum(n * (r / (1 + peak * r)) ** 2 for n, r in bets)
    reach = _REACH / max(1.0, math.sqrt(curvature), abs(slope(peak)))  # a peak at the rim falls off by its slope
    start, end = max(0.0, peak - reach), min(1.0, peak + reach)
    u = start + (end - start) * (_NODES + 1) / 2
    growth = sum(n * np.log1p(u * r) for n, r in bets)
    largest = float(np.max(growth))
    return largest + math.log((end - start) / 2 * float(_WEIGHTS @ np.exp(growth - largest)))


def _last(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Up to where something holds that holds near `low` and stops for good before `high`, by bisection."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
