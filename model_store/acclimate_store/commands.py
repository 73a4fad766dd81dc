"""What `acclimate models ...` does once its words are understood.

Each function takes the parsed arguments and gives the exit code; a BundleError says what could not be done.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from acclimate_adapters.errors import AcclimateError
from acclimate_store.add_onnx import add_onnx as export_onnx
from acclimate_store.architectures import FAMILIES
from acclimate_store.catalogue import BundleKey, Catalogue
from acclimate_store.compare import compare as compare_versions
from acclimate_store.create import Created, Description, create_model
from acclimate_store.errors import BundleError, ManifestError, MeasureError
from acclimate_store.manifest import Resize
from acclimate_store.measure import Choices
from acclimate_store.measure import measure as measure_model

ERRORS: Final = (AcclimateError,)
"""What ends a command with its message alone."""


def create(arguments: argparse.Namespace) -> int:
    """Publish a network of the user and print what was found of it."""
    created = create_model(
        arguments.store,
        BundleKey.parse(f"{arguments.name}/{arguments.version}"),
        Description(
            architecture=arguments.arch,
            options=_options(arguments.arch_options),
            weights=arguments.weights,
            classes=_classes(arguments.classes),
            shape=_size("--size", arguments.size),
            mean=_numbers("--mean", arguments.mean),
            std=_numbers("--std", arguments.std),
            resize=_resize(arguments),
            classifier=arguments.classifier,
            accuracy=arguments.accuracy,
        ),
        arguments.licence,
    )
    print(_report(created))
    return 0


def list(arguments: argparse.Namespace) -> int:
    """Print name/version, architecture, number of classes and input shape of each bundle."""
    catalogue = Catalogue(arguments.store)
    for key in catalogue.list():
        print(_summary(catalogue, key))
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print the manifest as JSON, and to stderr which adapter is the default and why."""
    catalogue, key = Catalogue(arguments.store), BundleKey.parse(arguments.bundle)
    print(catalogue.manifest(*key).to_json(), end="")
    print(catalogue.default(*key), file=sys.stderr)
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Print every problem of a bundle, or that there is none."""
    catalogue = _trusting(arguments)
    key = catalogue.resolve(*BundleKey.parse(arguments.bundle))
    problems = catalogue.verify(*key)
    for problem in problems:
        print(f"{key}: {problem}")
    if not problems:
        print(f"{key}: ok")
    return 1 if problems else 0


def compare(arguments: argparse.Namespace) -> int:
    """Print what becomes of clients' states when one version takes the place of another."""
    old, new = BundleKey.parse(arguments.old), BundleKey.parse(arguments.new)
    print("\n".join(compare_versions(Catalogue(arguments.store), old, new)))
    return 0


def measure(arguments: argparse.Namespace) -> int:
    """Measure a model on labelled images, publish it with what was found, and print that."""
    if arguments.anchors is not None and arguments.anchors < 0:
        raise MeasureError(f"--anchors {arguments.anchors}: a number of images per class, 0 for none")
    choices = Choices(
        prior=arguments.prior, anchors=arguments.anchors, graphs=not arguments.no_onnx, force=arguments.force
    )
    key = BundleKey.parse(arguments.bundle)
    with progress_bar("image") as advance:
        found = measure_model(
            _trusting(arguments), key, arguments.data, version=arguments.version, choices=choices, progress=advance
        )
    measured = found.measured
    lines = [
        f"{found.key}: published",
        f"  frozen accuracy  {100 * measured.accuracy:.2f} % of {sum(measured.rows)} images",
        f"  images a class   {min(measured.rows)} to {max(measured.rows)}",
        f"  pixels           mean {_list(measured.mean)}, std {_list(measured.std)}",
        f"  anchors          {found.anchors} images a class",
        *(f"  note             {note}" for note in found.notes),
    ]
    print("\n".join(lines))
    return 0


def add_onnx(arguments: argparse.Namespace) -> int:
    """Export the passes that need no gradient and publish the bundle with their graphs as a new version."""
    key = BundleKey.parse(arguments.bundle)
    new = export_onnx(_trusting(arguments), key, arguments.version, lambda what: print(f"{what} ...", file=sys.stderr))
    print(f"{new}: published with ONNX graphs")
    return 0


@contextmanager
def progress_bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, told what is done and how much there is."""
    from tqdm import tqdm

    with tqdm(unit=unit, disable=None, leave=False) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance


def _trusting(arguments: argparse.Namespace) -> Catalogue:
    return Catalogue(arguments.store, allowed_imports=tuple(arguments.allow_import))


def _summary(catalogue: Catalogue, key: BundleKey) -> str:
    try:
        manifest = catalogue.manifest(*key)
    except BundleError:
        return f"{key}  unreadable; see: acclimate models verify {key}"
    shape = "x".join(map(str, manifest.input.shape))
    return f"{key}  {manifest.architecture}  {len(manifest.classes)} classes  {shape}"


def _report(created: Created) -> str:
    """What was found of a network, for its user to look over."""
    manifest, anatomy = created.manifest, created.anatomy
    resize = manifest.input.resize
    files = "image files must have this size" if resize is None else f"image files: {_rule(resize)}"
    norms = f"{len(anatomy.norms)} layers" if anatomy.norms else "none"
    last = "none" if anatomy.classifier is None else f"{anatomy.classifier}: {anatomy.features} features"
    if anatomy.without_statistics:
        norms += f"; without running statistics, and so not adapted: {', '.join(anatomy.without_statistics)}"
    lines = [
        f"{manifest.key}: published in {created.directory}",
        *(f"  weights     {note}" for note in created.notes),
        f"  input       {'x'.join(map(str, anatomy.shape))}, mean {_list(manifest.input.mean)}, "
        f"std {_list(manifest.input.std)}; {files}",
        f"  classifier  {last}, {anatomy.classes} classes "
        f"({', '.join(manifest.classes[:4])}{', ...' if anatomy.classes > 4 else ''})",
        f"  BatchNorm   {norms}",
    ]
    if anatomy.classifier is None:
        lines.append("  note        no linear layer gives the answer, and no 1x1 convolution a map whose mean it is")
    if created.unservable:
        absent = ", ".join(f"{name} (no {', '.join(lacking)})" for name, lacking in created.unservable.items())
        lines.append(f"  not served  {absent}")
    if manifest.architecture.partition(":")[0] not in FAMILIES:
        lines += [
            f"  to measure  --allow-import {manifest.architecture}, as for learn and evaluate",
            f"  to serve    ACCLIMATE_ALLOWED_IMPORTS='[\"{manifest.architecture}\"]'",
        ]
    return "\n".join(lines)


def _rule(resize: Resize) -> str:
    """A resize rule in words."""
    side = resize.shorter_side
    target = f"shorter side {side}" if side is not None else f"resized to {resize.target[0]}x{resize.target[1]}"
    crop = "" if resize.crop is None else f", centre {resize.result[0]}x{resize.result[1]}"
    return f"{target}{crop} ({resize.interpolation}{'' if resize.antialias else ', not antialiased'})"


def _list(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ManifestError(f"--arch-options is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise ManifestError('--arch-options is a JSON object, such as {"width": 64}')
    return options


def _classes(text: str | None) -> tuple[str, ...] | None:
    """Names from words, from the lines of a file, or from the folders in a folder, sorted as ImageFolder does."""
    if text is None:
        return None
    path = Path(text)
    if path.is_dir():
        names = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
    elif path.is_file():
        names = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    elif "," in text:
        names = [name.strip() for name in text.split(",")]
    else:
        raise ManifestError(f"--classes {text}: there is no such file or folder; several names are written a,b,c")
    if len(names) < 2:
        raise ManifestError(f"--classes {text} names {len(names)} classes; at least 2 are needed")
    return tuple(names)


def _size(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if not all(part.isdigit() for part in parts) or len(parts) > 3:
        raise ManifestError(f"{option} {text!r} is no size; write 224, or 128x256 for height and width")
    sizes = tuple(map(int, parts))
    return sizes * 2 if len(sizes) == 1 else sizes


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ManifestError(f"{option} {text!r} are no numbers; write 0.485,0.456,0.406, or one for all") from None


def _resize(arguments: argparse.Namespace) -> Resize | None:
    if arguments.resize is None:
        if arguments.crop is not None:
            raise ManifestError("--crop is taken after --resize; give both")
        return None
    size: Any = _size("--resize", arguments.resize)
    rule = {
        "size": size[0] if "x" not in arguments.resize.lower() else size,
        "crop": _size("--crop", arguments.crop),
        "interpolation": arguments.interpolation,
        "antialias": not arguments.no_antialias,
    }
    try:
        return Resize.model_validate(rule)
    except ValueError as error:
        raise ManifestError(f"--resize, --crop: {error}") from error
