"""The methods that the benchmark compares, and the options under which each repeats the reference program."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from acclimate_adapters import ADAPTERS
from acclimate_bench.errors import BenchError

Options = dict[str, Any]
Hparams = Mapping[str, Mapping[str, Any]]  # method -> recorded hyper-parameters of one shift

ENROLLED = 40  # labelled images of each client that the methods with a personal head are given
BLOCKS = {"block1": ["conv1", "bn1"], "last_layer": ["linear5"]}  # the reference's names of layers
BATCH_NORM_2D = ["bn1", "bn2", "bn3"]


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the table.

    Args:
        name: of the row.
        adapter: name in the registry, or of a chain.
        options: recorded hyper-parameters of a shift -> options of the adapter.
        reference: under which the accuracies were recorded, if they were.
        enrolled: so many labelled images of each client are given beforehand, and not answered.
        slow: takes minutes, and therefore answers the recorded subset only.
    """

    name: str
    adapter: str
    options: Callable[[Hparams], Options] = lambda _: {}
    reference: str | None = None
    enrolled: int = 0
    slow: bool = False

    def hyperparameters(self, recorded: Hparams, seed: int) -> Options:
        """Everything that `create` is given; the seed goes to those adapters that draw random numbers."""
        kind = ADAPTERS.get(self.adapter)
        seeded = kind is not None and "seed" in kind.__dataclass_fields__
        return {**self.options(recorded), **({"seed": seed} if seeded else {})}


def _surgical(h: Hparams) -> Options:
    return {"modules": BLOCKS[h["surgical"]["block"]], "lr": h["surgical"]["lr"]}


def _em(h: Hparams) -> Options:
    return {"steps": h["em"]["epochs"]}


_KNOWN = (
    Method("none", "none", reference="none"),
    Method("bn_adapt", "bn_adapt", lambda h: {**h["bn_adapt"]}, "bn_adapt"),
    # the reference trains BatchNorm2d only; bn4 is a BatchNorm1d
    Method("tent", "tent", lambda h: {**h["tent"], "layers": BATCH_NORM_2D}, "tent"),
    # the reference has the pseudo-labels only in their simplest form
    Method("shot", "shot", lambda h: {**h["shot"], "centroids": "soft"}, "shot"),
    Method("t3a", "t3a", lambda h: {**h["t3a"]}, "t3a"),
    Method("surgical", "surgical", _surgical, "surgical"),
    Method("em", "em", _em, "em"),
    # the reference inverts the confusion matrix and projects; the default is constrained least squares
    Method("bbse_soft", "bbse", lambda _: {"mode": "soft", "solver": "pinv"}, "bbse_soft"),
    Method("bbse_hard", "bbse", lambda _: {"mode": "hard", "solver": "pinv"}, "bbse_hard"),
    Method("atp_batch", "atp", lambda _: {"mode": "batch"}, "atp_batch"),
    Method("atp_online", "atp", lambda _: {"mode": "online"}, "atp_online"),
    Method("dynfed_identity", "dynfed", lambda _: {"arn": "identity"}),
    Method("dynfed_mlp", "dynfed", lambda _: {"arn": "mlp"}),
    Method("fedcal_pl", "fedcal", lambda _: {"estimator": "pl"}),
    Method("fedcal_em", "fedcal", lambda _: {"estimator": "em"}),
    Method("fedcal_fm", "fedcal", lambda _: {"estimator": "fm"}),
    Method("fed_ade", "fed_ade"),
    Method("balanced", "balanced", reference="balanced"),
    Method("consensus", "consensus"),
    Method("atp+em", "atp+em", lambda h: {"em": _em(h)}),
    Method("atp+fedcal", "atp+fedcal"),
    Method("bn_adapt+em", "bn_adapt+em", lambda h: {"bn_adapt": h["bn_adapt"], "em": _em(h)}),
    Method("bn_adapt+fedcal", "bn_adapt+fedcal", lambda h: {"bn_adapt": h["bn_adapt"]}),
    Method("memo", "memo", lambda h: {**h["memo"]}, "memo_subset", slow=True),
    Method("fedthe", "fedthe", enrolled=ENROLLED),
    Method("fedthe_plus", "fedthe_plus", enrolled=ENROLLED, slow=True),
)

METHODS = tuple(method for method in _KNOWN if all(part in ADAPTERS for part in method.adapter.split("+")))
"""Every method whose adapters are registered, in the order of the tables."""


def choose(names: Sequence[str], *, slow: bool) -> tuple[Method, ...]:
    """The methods of some names; without names all of them, the slow ones only when asked for.

    Raises:
        BenchError: there is no method of some name.
    """
    known = {method.name: method for method in METHODS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BenchError(f"there is no method {', '.join(unknown)}; there are {', '.join(known)}")
    if names:
        return tuple(method for method in METHODS if method.name in names)
    return tuple(method for method in METHODS if slow or not method.slow)
