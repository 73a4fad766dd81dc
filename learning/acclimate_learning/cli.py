"""`acclimate learn` and `acclimate evaluate`: only their words, so that `--help` answers at once; see `commands`."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from acclimate_store.cli import by_name

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_COMMANDS: Final = "acclimate_learning.commands"


def add_parser(subparsers: "Subparsers", default_store: Path, replay: Callable[[], Any]) -> None:
    """Add both commands; `run` in the parsed arguments gives the exit code, 2 for what could not be done.

    Args:
        subparsers: to which.
        default_store: the model store, unless another one is named.
        replay: gives the `Replay` by which labels are asked for; raises ModuleNotFoundError where it lacks something.
    """
    text = (
        "learn adaptation rates and hyper-parameters from labelled images, and judge them on clients that were held out"
    )
    learn = subparsers.add_parser("learn", help=text, description=text)
    _add_common(learn, default_store)
    learn.add_argument("--data", type=Path, required=True, metavar="DATA", help="labelled images, as models measure")
    _add_population(learn)
    learn.add_argument("--rounds", type=int, default=120, help="of communication, at most (default: %(default)s)")
    learn.add_argument("--cohort", type=int, default=30, help="clients of a round (default: %(default)s)")
    learn.add_argument("--lr", type=float, help="learning rate of the rates (default: found by a short search)")
    learn.add_argument(
        "--tune",
        metavar="NAMES",
        help="adapters whose hyper-parameters are chosen, too: fedthe,surgical,dynfed, or none "
        "(default: those that the network can have)",
    )
    learn.add_argument("--checkpoint", type=Path, metavar="FILE", help="written as it goes on; taken up if it is there")
    _add_report(learn)
    learn.set_defaults(run=by_name(_COMMANDS, "learn"))

    text = "judge every adapter that a bundle can serve on labelled client streams, and say which to choose"
    evaluate = subparsers.add_parser("evaluate", help=text, description=text)
    _add_common(evaluate, default_store)
    evaluate.add_argument(
        "--clients", type=Path, metavar="DATA", help="labelled streams: a folder per client with one per class, or --by"
    )
    evaluate.add_argument("--data", type=Path, metavar="DATA", help="labelled images from which clients are simulated")
    _add_population(evaluate)
    evaluate.add_argument("--adapters", metavar="NAMES", help="a,b+c (default: all that the bundle has everything for)")
    evaluate.add_argument(
        "--asked",
        nargs="+",
        type=_share,
        metavar="SHARE",
        help="also replay the streams with the labels that the service would ask for, within such budgets: 0 0.01 0.05",
    )
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    evaluate.add_argument("--picture", type=Path, metavar="FILE", help="draw the gains there, as SVG")
    _add_report(evaluate)
    evaluate.add_argument("--write", action="store_true", help="publish the next version with what is recommended")
    evaluate.set_defaults(run=by_name(_COMMANDS, "evaluate"), replay=replay)


def add_import_atp(subparsers: "Subparsers", default_store: Path) -> None:
    """Add `import-atp` to the commands of `acclimate models`."""
    text = "take adaptation rates that the authors' program of ATP saved, a tensor by position"
    parser = subparsers.add_parser("import-atp", help=text, description=text)
    _add_common(parser, default_store)
    parser.add_argument("--rates", type=Path, required=True, metavar="FILE", help="of torch.save, .npy or JSON list")
    parser.set_defaults(run=by_name(_COMMANDS, "import_atp"))


def _add_common(parser: argparse.ArgumentParser, default_store: Path) -> None:
    parser.add_argument("bundle", metavar="NAME", help="name, for its newest version, or name/version")
    parser.add_argument("--store", type=Path, default=default_store, help="model store (default: %(default)s)")
    parser.add_argument("--as", dest="version", metavar="VERSION", help="of the new bundle (default: the next)")
    parser.add_argument(
        "--allow-import", action="append", default=[], metavar="MODULE:CALLABLE", help="architecture to trust"
    )
    parser.add_argument("--no-onnx", action="store_true", help="export no graphs for ONNX Runtime")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write what was found there as a page to read, in one HTML file"
    )


def _add_population(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shift",
        choices=("mixed", "both", "label", "feature", "none"),
        default="mixed",
        help="of the simulated clients: of labels, of features (corruptions), both, or one of the three in turn",
    )
    parser.add_argument("--partition", default="step", help="of labels: step, dirichlet:0.3 or pathological:2")
    parser.add_argument(
        "--like", type=Path, metavar="DIR", help="unlabelled images of the target side, to choose the corruptions by"
    )
    parser.add_argument("--by", metavar="COLUMN", help="column or array that names real clients; none are simulated")
    parser.add_argument("--teachers", type=int, default=60, help="clients to learn from (default: %(default)s)")
    parser.add_argument("--judges", type=int, default=40, help="clients to judge by (default: %(default)s)")
    parser.add_argument("--teacher-images", type=int, default=40, help="of each (default: %(default)s)")
    parser.add_argument("--judge-images", type=int, default=200, help="of each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same clients and rates")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use a share of the rows from 0 to 1, such as 0.01")
    return share
