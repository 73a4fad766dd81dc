"""`acclimate models list|show|verify|add-moments|add-onnx`: a model store from the command line."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from acclimate_store.add_moments import add_moments
from acclimate_store.add_onnx import add_onnx
from acclimate_store.catalogue import BundleKey, Catalogue
from acclimate_store.errors import BundleError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: "Subparsers", default_store: Path) -> None:
    """Add the `models` command.

    Each sub-command sets `run` in the parsed arguments: a function from them to the exit code. 0 is success, 1 a
    bundle with problems, 2 what could not be done: a bundle or store that is not there, data that does not do.
    """
    models = subparsers.add_parser("models", help="list, show, verify and complete model bundles")
    commands = models.add_subparsers(dest="models_command", required=True)
    for name, action, text in (
        ("list", list_models, "one line for each bundle"),
        ("show", show_model, "print the manifest of a bundle"),
        ("verify", verify_model, "check every file and try the model"),
        (
            "add-moments",
            publish_moments,
            "measure what 'balanced' needs; publish the next version of the bundle with it",
        ),
        (
            "add-onnx",
            publish_graphs,
            "export the model for ONNX Runtime; publish the next version of the bundle with its graphs",
        ),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--store", type=Path, default=default_store, help="model store (default: %(default)s)")
        if action is not list_models:
            command.add_argument("bundle", help="name, for its newest version, or name/version")
        if action is publish_moments:
            _add_data(command)
        if action in (publish_moments, publish_graphs):
            command.add_argument(
                "--as", dest="version", metavar="VERSION", help="of the new bundle (default: the next)"
            )
        if action in (verify_model, publish_moments, publish_graphs):
            command.add_argument(
                "--allow-import", action="append", default=[], metavar="MODULE:CALLABLE", help="architecture to trust"
            )
        command.set_defaults(run=action)


def list_models(arguments: argparse.Namespace) -> int:
    """Print name/version, architecture, number of classes and input shape of each bundle."""
    catalogue = Catalogue(arguments.store)
    try:
        keys = catalogue.list()
    except BundleError as error:
        return _fail(error)
    for key in keys:
        print(_summary(catalogue, key))
    return 0


def show_model(arguments: argparse.Namespace) -> int:
    """Print the manifest as JSON."""
    try:
        print(Catalogue(arguments.store).manifest(*BundleKey.parse(arguments.bundle)).to_json(), end="")
    except BundleError as error:
        return _fail(error)
    return 0


def verify_model(arguments: argparse.Namespace) -> int:
    """Print every problem of a bundle, or that there is none."""
    catalogue = Catalogue(arguments.store, allowed_imports=tuple(arguments.allow_import))
    try:
        key = catalogue.resolve(*BundleKey.parse(arguments.bundle))
    except BundleError as error:
        return _fail(error)
    problems = catalogue.verify(*key)
    for problem in problems:
        print(f"{key}: {problem}")
    if not problems:
        print(f"{key}: ok")
    return 1 if problems else 0


def publish_moments(arguments: argparse.Namespace) -> int:
    """Measure class moments on labelled source images and publish the bundle with them as a new version."""
    from tqdm import tqdm  # the other commands start without it

    catalogue = Catalogue(arguments.store, allowed_imports=tuple(arguments.allow_import))
    try:
        with tqdm(unit="image", disable=None, leave=False) as bar:

            def advance(done: int, rows: int) -> None:
                bar.total = rows
                bar.update(done - bar.n)

            key = add_moments(catalogue, BundleKey.parse(arguments.bundle), arguments.data, arguments.version, advance)
    except BundleError as error:
        return _fail(error)
    print(f"{key}: published with class moments")
    return 0


def publish_graphs(arguments: argparse.Namespace) -> int:
    """Export the passes that need no gradient and publish the bundle with their graphs as a new version."""
    catalogue = Catalogue(arguments.store, allowed_imports=tuple(arguments.allow_import))
    try:
        key = add_onnx(catalogue, BundleKey.parse(arguments.bundle), arguments.version, _say)
    except BundleError as error:
        return _fail(error)
    print(f"{key}: published with ONNX graphs")
    return 0


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr)


def _add_data(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="labelled images of the training side, every class among them: an .npz file with images [N, C, H, W], "
        "uint8 or float32 in 0..1, and integer labels [N]",
    )


def _summary(catalogue: Catalogue, key: BundleKey) -> str:
    try:
        manifest = catalogue.manifest(*key)
    except BundleError:
        return f"{key}  unreadable; see: acclimate models verify {key}"
    shape = "x".join(map(str, manifest.input.shape))
    return f"{key}  {manifest.architecture}  {len(manifest.classes)} classes  {shape}"


def _fail(error: BundleError) -> int:
    print(error, file=sys.stderr)
    return 2
