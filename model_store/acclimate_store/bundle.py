"""A bundle: one published version of a frozen model, with all that serving it needs."""

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from acclimate_adapters import Adapter, FrozenModel, Source, create, missing
from acclimate_adapters.balanced.passes import Passes
from acclimate_adapters.errors import ConfigurationError
from acclimate_store.architectures import build
from acclimate_store.errors import BundleError, BundleExists, ManifestError, TensorError
from acclimate_store.files import GOLDEN_FILE, MODEL_FILE, check_files, encode_tensors, load_weights, sha256
from acclimate_store.golden import check_golden, record_golden
from acclimate_store.manifest import MANIFEST_FILE, SAFEST, Default, Golden, Manifest
from acclimate_store.runtimes import Choice, choose
from acclimate_store.sources import check_source, encode_source, read_source
from acclimate_store.staging import Staging

PLAIN: Final = "contiguous"
"""The memory layout in which images come."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A model ready to serve.

    Args:
        manifest: of the bundle.
        model: the model.
        runtime: name and version of what computes the frozen passes.
        passes: what computes those of `balanced`; None for torch.
        staging: the way to the model's device, if that is not the host's memory.
        layout: in which memory torch's passes keep their images; see `layout_choice`.
    """

    manifest: Manifest
    model: FrozenModel
    runtime: str
    passes: Passes | None = None
    staging: Staging | None = None
    layout: str = PLAIN

    def default(self, offered: Collection[str] | None = None) -> Default:
        """The adapter of clients that choose none, where these adapters are offered; None stands for all."""
        allowed = offered is None or SAFEST in offered
        return self.manifest.default(servable=allowed and not missing(create(SAFEST), self.model))

    def prepare(self, images: NDArray[Any]) -> Tensor:
        """Normalised network input on the model's device; see `InputSpec.normalise`.

        Args:
            images: [B, C, H, W], uint8 in 0..255 or float32 in 0..1.

        Raises:
            InputError: another shape or type.
        """
        batch = images if self.staging is None else self.staging.send(images)
        return self.manifest.input.normalise(batch, self.model.device)


def load_bundle(
    directory: Path,
    device: torch.device | str = "cpu",
    allowed_imports: Collection[str] = (),
    runtime: Choice = "torch",
) -> Bundle:
    """Verify a bundle, build its network and try it.

    Args:
        directory: `<store>/<name>/<version>`.
        device: where the model will run.
        allowed_imports: see `architectures.build`.
        runtime: see `runtimes.choose`.

    Raises:
        GraphError: see `runtimes.choose`.
        GoldenError: see `golden.check_golden`.
        ManifestError: the manifest is missing or malformed.
        IntegrityError: a file is missing, changed or unlisted.
        ArchitectureError: the network cannot be built.
        TensorError: weights or source do not fit the network, or it answers with nonsense.
    """
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    model = _read_model(directory, manifest, device, allowed_imports)
    check_source(model)
    model = model.with_gains(_proven_gains(manifest))
    probe = _probe(manifest, model)
    chosen = choose(runtime, model, directory, manifest.files, probe)
    check_golden(directory, manifest, chosen.model)
    staging = Staging(model.device) if model.device.type == "cuda" else None
    return Bundle(manifest, chosen.model, chosen.name, chosen.passes, staging)


def _proven_gains(manifest: Manifest) -> dict[Adapter, float]:
    """The least that the adapter of the evidence gains, where that suffices for a default."""
    told = manifest.evidence
    if told is None or told.obstacle:
        return {}
    try:
        return {create(told.adapter, **told.options): told.low}
    except ConfigurationError:  # of another version of this code; whoever serves it by default is told so
        return {}


def inspect_bundle(directory: Path, allowed_imports: Collection[str] = ()) -> tuple[str, ...]:
    """Everything that is wrong with a bundle; empty when `load_bundle` would accept it."""
    try:
        manifest = read_manifest(directory)
    except BundleError as error:
        return error.problems
    parts: tuple[Callable[[], object], ...] = (
        lambda: check_files(directory, manifest),
        lambda: _read_network(directory, manifest, allowed_imports),
        lambda: read_source(directory, manifest.input),
    )
    problems = dict.fromkeys(problem for part in parts for problem in _problems(part))
    return tuple(problems) or _problems(lambda: load_bundle(directory, "cpu", allowed_imports, "auto"))


def read_manifest(directory: Path) -> Manifest:
    """Parse the manifest of a bundle.

    Raises:
        ManifestError: it is missing or malformed.
    """
    path = directory / MANIFEST_FILE
    if not path.is_file():
        raise ManifestError(f"{directory} is no bundle: it has no {MANIFEST_FILE}")
    return Manifest.from_json(path.read_bytes())


def write_bundle(
    root: Path,
    manifest: Manifest,
    net: nn.Module,
    source: Source,
    *,
    extra: Mapping[str, bytes] | None = None,
    allowed_imports: Collection[str] = (),
) -> Path:
    """Publish a bundle as `<root>/<name>/<version>`, whole or not at all.

    Args:
        root: the store.
        manifest: everything but `files`, which is filled in here.
        net: its weights and buffers are stored.
        source: quantities of the training side.
        extra: further files by path inside the bundle, such as a licence text.
        allowed_imports: see `architectures.build`.

    Returns:
        The directory of the new bundle.

    Raises:
        BundleExists: that version is published already.
        BundleError: the result could not be loaded; nothing is published.
    """
    contents = {**(extra or {}), MODEL_FILE: encode_tensors(net.state_dict()), **encode_source(source)}
    return write_files(root, manifest, contents, allowed_imports)


def write_files(
    root: Path, manifest: Manifest, contents: Mapping[str, bytes | Path], allowed_imports: Collection[str] = ()
) -> Path:
    """Publish a bundle from the contents of its files, as `write_bundle` does.

    Args:
        root: the store.
        manifest: everything but `files`, which is filled in here.
        contents: by path inside the bundle: bytes, or a file elsewhere in the store, which is shared (a hard link) and
            not copied where the file system can. A golden batch is recorded where there is no file of one.
        allowed_imports: see `architectures.build`.
    """
    target = root / manifest.name / manifest.version
    sealed = _seal(manifest, contents)
    if target.exists():
        raise _exists(sealed)
    # The leading dot hides a half-written bundle from the catalogue.
    staging = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        _write(staging, contents)
        if GOLDEN_FILE not in contents:
            model = _read_model(staging, sealed, "cpu", allowed_imports)
            _probe(sealed, model)
            golden = {GOLDEN_FILE: record_golden(model, sealed.input)}
            sealed = _seal(manifest.model_copy(update={"golden": Golden()}), {**contents, **golden})
            _write(staging, golden)
        _write(staging, {MANIFEST_FILE: sealed.to_json().encode()})
        load_bundle(staging, "cpu", allowed_imports, "auto")
        _publish(staging, target, sealed)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _seal(manifest: Manifest, contents: Mapping[str, bytes | Path]) -> Manifest:
    digests = {file: sha256(content) for file, content in sorted(contents.items())}
    # Through JSON and not `model_copy`, which would not check the new paths.
    return Manifest.from_json(manifest.model_copy(update={"files": digests}).to_json())


def _write(directory: Path, contents: Mapping[str, bytes | Path]) -> None:
    for file, content in contents.items():
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
            continue
        try:
            os.link(content, path)
        except OSError:  # another file system, or one without links
            shutil.copyfile(content, path)


def _publish(staging: Path, target: Path, manifest: Manifest) -> None:
    try:
        staging.rename(target)
    except OSError as error:
        if target.exists():  # somebody else published it since we looked
            raise _exists(manifest) from error
        raise


def _exists(manifest: Manifest) -> BundleExists:
    return BundleExists(f"{manifest.key} is published already and never changes; publish a new version")


def _read_model(
    directory: Path, manifest: Manifest, device: torch.device | str, allowed_imports: Collection[str]
) -> FrozenModel:
    """The model of a bundle, computed by torch."""
    net = _read_network(directory, manifest, allowed_imports)
    source = read_source(directory, manifest.input, device)
    try:
        model = FrozenModel.from_module(net.to(device), classifier=manifest.classifier, source=source)
    except ConfigurationError as error:
        raise TensorError(f"{manifest.key} contradicts itself: {error}") from error
    if model.classes != len(manifest.classes):
        raise ManifestError(f"{manifest.key} names {len(manifest.classes)} classes, its network has {model.classes}")
    return model


def _read_network(directory: Path, manifest: Manifest, allowed_imports: Collection[str]) -> nn.Module:
    net = build(manifest.architecture, manifest.architecture_options, allowed_imports)
    load_weights(net, directory)
    return net


def _probe(manifest: Manifest, model: FrozenModel) -> Tensor:
    """A batch, a black image and a noise image, that the network answered before any client's."""
    noise = torch.randint(0, 256, (2, *manifest.input.shape), generator=torch.Generator().manual_seed(0))
    noise[0] = 0
    try:
        x = manifest.input.normalise(noise.to(torch.uint8), model.device)
        logits = model.frozen(x).logits
    except Exception as error:  # foreign layers may raise anything
        raise TensorError(f"{manifest.key} fails on a test batch: {error}") from error
    if not bool(torch.isfinite(logits).all()):
        raise TensorError(f"{manifest.key} answers a test batch with non-finite logits; check its weights")
    return x


def _problems(part: Callable[[], object]) -> tuple[str, ...]:
    try:
        part()
    except BundleError as error:
        return error.problems
    return ()
