"""What a step takes of the network, counted: so that whoever serves it can tell what it will cost before it begins."""

from typing import NamedTuple


class Runs(NamedTuple):
    """How often something is run, and over how many rows in all of these runs."""

    calls: int = 0
    rows: int = 0

    def times(self, number: int) -> "Runs":
        """So many times as much."""
        return Runs(self.calls * number, self.rows * number)

    def and_also(self, other: "Runs") -> "Runs":
        """Both together."""
        return Runs(self.calls + other.calls, self.rows + other.rows)


class Cost(NamedTuple):
    """What is run of the network; small work that is done once per batch is left out."""

    forward: Runs = Runs()  # passes without gradient
    gradient: Runs = Runs()  # passes forward and backward, with all parameters changed after each
    head: Runs = Runs()  # steps of the classifier alone on known features, forward and backward
    posterior: Runs = Runs()  # sweeps over posteriors [rows, K], as a step of EM takes

    def times(self, number: int) -> "Cost":
        """So many times as much."""
        return Cost(*(runs.times(number) for runs in self))

    def and_also(self, *others: "Cost") -> "Cost":
        """All of them together."""
        total = list(self)
        for other in others:
            total = [a.and_also(b) for a, b in zip(total, other, strict=True)]
        return Cost(*total)


def forward_pass(rows: int) -> Cost:
    """One pass without gradient."""
    return Cost(forward=Runs(1, rows))


def gradient_pass(rows: int) -> Cost:
    """One pass forward and backward."""
    return Cost(gradient=Runs(1, rows))


def head_step(rows: int) -> Cost:
    """One step of the classifier alone."""
    return Cost(head=Runs(1, rows))


def posterior_sweep(rows: int) -> Cost:
    """One sweep over posteriors."""
    return Cost(posterior=Runs(1, rows))
