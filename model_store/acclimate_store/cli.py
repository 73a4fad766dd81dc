"""`acclimate models ...`: a model store from the command line.

Only the words are here, so that `--help` answers at once; what they do is in `commands`, imported when one is run.
"""

import argparse
import gc
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_COMMANDS: Final = "acclimate_store.commands"


def add_parser(subparsers: "Subparsers", default_store: Path) -> "Subparsers":
    """Add the `models` command; to what is given more sub-commands may be added.

    Each sub-command sets `run` in the parsed arguments: a function from them to the exit code. 0 is success, 1 a
    bundle with problems, 2 what could not be done: a bundle or store that is not there, data that does not do.
    """
    models = subparsers.add_parser("models", help="create, measure, list, show, compare and verify model bundles")
    commands = models.add_subparsers(dest="models_command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=text, description=text)
        parser.add_argument("--store", type=Path, default=default_store, help="model store (default: %(default)s)")
        parser.set_defaults(run=by_name(_COMMANDS, name.replace("-", "_")))
        return parser

    _add_create(command("create", "publish a network of yours as version 1 of a bundle"))
    command("list", "one line for each bundle")
    _add_bundle(command("show", "print the manifest of a bundle"))
    verify = command("verify", "check every file and try the model")
    _add_bundle(verify)
    _add_trust(verify)
    comparison = command("compare", "say which clients keep their state when one version takes the place of another")
    comparison.add_argument("old", help="name/version that was served")
    comparison.add_argument("new", help="name/version that is to be, or a name for its newest version")
    _add_measure(command("measure", "measure on labelled images what adapters need; publish the next version with it"))
    graphs = command("add-onnx", "export the model for ONNX Runtime; publish the next version with its graphs")
    _add_bundle(graphs)
    _add_new_version(graphs)
    return commands


def by_name(module: str, name: str, extra: str = "") -> Callable[[argparse.Namespace], int]:
    """A command whose module, and torch with it, is imported when it runs.

    Args:
        module: that has the function, and `ERRORS`, those that say by themselves what could not be done.
        name: of the function, from the parsed arguments to the exit code.
        extra: of the distribution that the module needs.

    Returns:
        A function from the parsed arguments to the exit code: 2, after one sentence, if something is not installed, or
        at one of `ERRORS`.
    """

    def run(arguments: argparse.Namespace) -> int:
        gc.disable()  # what is imported stays: to walk over it again and again takes a fifth of the time
        try:
            commands = import_module(module)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("acclimate"):
                raise
            print(f'acclimate: {error.name} is not installed; pip install "acclimate{extra}"', file=sys.stderr)
            return 2
        finally:
            gc.enable()
        try:
            code: int = getattr(commands, name)(arguments)
        except commands.ERRORS as error:
            print(f"acclimate: {error}", file=sys.stderr)
            return 2
        return code

    return run


def _add_create(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the bundle")
    parser.add_argument(
        "--arch",
        required=True,
        metavar="ARCHITECTURE",
        help="torchvision:resnet18, timm:<model>, transformers:DIR (a folder with config.json and model.safetensors), "
        "or package.module:callable, which may be a file of the working directory and is run",
    )
    parser.add_argument("--arch-options", default="{}", metavar="JSON", help="keyword arguments of the architecture")
    parser.add_argument("--weights", type=Path, metavar="FILE", help=".safetensors, or a state dict of torch.save")
    parser.add_argument(
        "--classes",
        metavar="NAMES",
        help="in the order of the outputs: a,b,c; a file with one name per line; or a folder with a folder per class",
    )
    parser.add_argument("--size", metavar="[Cx]HxW", help="of the input; one number for a square")
    parser.add_argument("--mean", metavar="NUMBERS", help="per channel, of pixels in 0..1: 0.485,0.456,0.406")
    parser.add_argument("--std", metavar="NUMBERS", help="per channel, of pixels in 0..1: 0.229,0.224,0.225")
    parser.add_argument(
        "--resize",
        metavar="SIZE",
        help="what image files are resized to, as torchvision's Resize: 256 (the shorter side, with --crop) or HxW; "
        "without it they must have the size of the input",
    )
    parser.add_argument("--crop", metavar="SIZE", help="central crop after --resize: 224 or HxW")
    parser.add_argument("--interpolation", choices=("bilinear", "bicubic"), default="bilinear", help="of --resize")
    parser.add_argument("--no-antialias", action="store_true", help="--resize as torchvision did on tensors until 0.16")
    parser.add_argument("--classifier", metavar="LAYER", help="the last linear layer, if it is not found")
    parser.add_argument("--accuracy", type=float, metavar="0..1", help="that it should have; measuring compares")
    parser.add_argument("--licence", default="not stated", help="of the weights")
    parser.add_argument("--version", default="1", help="of the bundle (default: %(default)s)")


def _add_bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="name, for its newest version, or name/version")


def _add_new_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--as", dest="version", metavar="VERSION", help="of the new bundle (default: the next)")
    _add_trust(parser)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-import", action="append", default=[], metavar="MODULE:CALLABLE", help="architecture to trust"
    )


def _add_measure(parser: argparse.ArgumentParser) -> None:
    _add_bundle(parser)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DATA",
        help="labelled images of the training side, every class among them: a folder with a folder per class, .npz "
        "(images, labels), idx, or Parquet",
    )
    parser.add_argument(
        "--prior",
        choices=("data", "uniform"),
        default="data",
        help="of the classes in training: as in these images, or uniform, for networks trained with balanced classes",
    )
    parser.add_argument("--anchors", type=int, metavar="N", help="images per class published for fed_ade (default: 8)")
    parser.add_argument("--no-onnx", action="store_true", help="export no graphs for ONNX Runtime")
    parser.add_argument("--force", action="store_true", help="publish although the answers are not plausible")
    _add_new_version(parser)
