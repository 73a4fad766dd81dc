"""`acclimate models create`: from an architecture and somebody's weights to the first version of a bundle."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from pydantic import JsonValue, ValidationError
from torch import nn

from acclimate_adapters import ADAPTERS, FrozenModel, Source, create, missing
from acclimate_store.architectures import FAMILIES, LogitsOf, build, constructor_of, require_extra
from acclimate_store.bundle import write_bundle
from acclimate_store.catalogue import BundleKey
from acclimate_store.checkpoints import load_checkpoint, read_checkpoint
from acclimate_store.errors import ArchitectureError, BundleExists, ManifestError
from acclimate_store.files import sha256
from acclimate_store.inspection import Anatomy, Shape, inspect_network, possible_shapes
from acclimate_store.manifest import InputSpec, Manifest, Resize

AUXILIARY: Final[Mapping[str, tuple[str, ...]]] = {
    "torchvision:googlenet": ("aux1.", "aux2."),
    "torchvision:inception_v3": ("AuxLogits.",),
}
"""Heads that only training uses, by architecture: prefixes of their tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a user says of a model; None is what is to be found, or to be asked for.

    Args:
        architecture: as `architectures.build` takes it, or `transformers:DIR`.
        options: keyword arguments of its constructor.
        weights: file of the weights; by default that of the folder of transformers.
        classes: their names, in the order of the outputs.
        shape: height and width of the input, with the channels before them or without.
        mean: per channel, for pixels in 0..1; a single number stands for all channels.
        std: likewise.
        resize: how image files become the size of the input; None takes files of that size alone.
        classifier: name of the last layer.
        accuracy: 0..1, that the network should have on labelled images; `measure` compares.
    """

    architecture: str
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    weights: Path | None = None
    classes: tuple[str, ...] | None = None
    shape: tuple[int, ...] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: Resize | None = None
    classifier: str | None = None
    accuracy: float | None = None


@dataclass(frozen=True, slots=True)
class Created:
    """A new bundle, what was found, and what was recognised in the file of its weights.

    `unservable` are the adapters that it cannot have whatever is measured and learned, with what the network lacks.
    """

    directory: Path
    manifest: Manifest
    anatomy: Anatomy
    notes: tuple[str, ...]
    unservable: Mapping[str, tuple[str, ...]]


def create_model(root: Path, key: BundleKey, description: Description, licence: str = "not stated") -> Created:
    """Publish a network of the user as a bundle.

    Args:
        root: the store; it is made if it is not there.
        key: name and version of the bundle.
        description: of the network. An import path named in it is trusted.
        licence: of the weights.

    Raises:
        BundleError: something is missing or wrong; the message says what to give. Nothing is published then.
    """
    if (root / key.name / (key.version or "")).exists():
        raise BundleExists(f"{key} is published already and never changes; give another --version or NAME")
    told = _completed(description)
    said = _said(told)
    allowed = () if told.architecture.partition(":")[0] in FAMILIES else (told.architecture,)
    net = build(told.architecture, told.options, allowed)
    inner = net.network if isinstance(net, LogitsOf) else net
    notes = load_checkpoint(inner, read_checkpoint(said.weights), AUXILIARY.get(told.architecture, ()))
    anatomy = inspect_network(net.eval(), _shape(net, told), told.classifier)
    if anatomy.classes != len(said.classes):
        raise ManifestError(f"{len(said.classes)} classes are named, the network has {anatomy.classes}")
    manifest = _manifest(key, told, said, anatomy, licence)
    source = Source(prior=torch.full((anatomy.classes,), 1 / anatomy.classes))
    directory = write_bundle(root, manifest, net, source, allowed_imports=allowed)
    model = FrozenModel.from_module(net, classifier=anatomy.classifier, source=source)
    return Created(directory, manifest, anatomy, notes, _unservable(model))


def _unservable(model: FrozenModel) -> dict[str, tuple[str, ...]]:
    quantities = {field.name for field in fields(Source)}
    lacking = {name: set(missing(create(name), model)) - quantities for name in sorted(ADAPTERS)}
    return {name: tuple(sorted(each)) for name, each in lacking.items() if each}


def _completed(told: Description) -> Description:
    """The description with what the architecture itself says, which the user's words override."""
    family, _, name = told.architecture.partition(":")
    if not name:
        raise ArchitectureError(
            f"--arch {told.architecture!r} is no architecture; write torchvision:resnet18, timm:<model>, "
            "transformers:DIR or package.module:callable"
        )
    if family == "transformers":
        found = _from_transformers(Path(name))
    elif family == "timm":
        found = _from_timm(name)
    else:
        found = {}
    rule = found.get("resize")
    if rule and told.shape and rule.result != told.shape[-2:]:
        del found["resize"]  # which is for another size than the user's
    if told.architecture in AUXILIARY:
        found["options"] = {"aux_logits": False, "init_weights": False}
    unsaid = {key: value for key, value in found.items() if key == "architecture" or not getattr(told, key)}
    told = replace(told, **{**unsaid, "options": {**found.get("options", {}), **told.options}})
    if told.classes and "num_classes" not in told.options and _takes_num_classes(told.architecture):
        told = replace(told, options={**told.options, "num_classes": len(told.classes)})
    return told


def _takes_num_classes(architecture: str) -> bool:
    if architecture.startswith("transformers:"):
        return False
    if architecture.partition(":")[0] in FAMILIES:
        return True
    try:
        return "num_classes" in inspect.signature(constructor_of(architecture, (architecture,))).parameters
    except ValueError:  # some callables have no signature
        return False


def _from_transformers(folder: Path) -> dict[str, Any]:
    """What a folder of transformers says: `config.json`, `preprocessor_config.json`, `model.safetensors`."""
    require_extra("transformers")
    config = _json(folder / "config.json")
    kept = {
        k: v for k, v in config.items() if k not in {"architectures", "transformers_version", "dtype", "torch_dtype"}
    }
    found: dict[str, Any] = {
        "architecture": f"transformers:{config.get('model_type')}",
        "options": {"config": kept},
        "weights": folder / "model.safetensors",
    }
    if labels := config.get("id2label"):
        found["classes"] = tuple(labels[number] for number in sorted(labels, key=int))
    if (folder / "preprocessor_config.json").is_file():
        found |= _preprocessing(_json(folder / "preprocessor_config.json"))
    return found


def _preprocessing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Size, normalisation and resize rule of a `preprocessor_config.json`."""
    if not config.get("do_rescale", True):
        raise ManifestError("preprocessor_config.json leaves pixels in 0..255 (do_rescale); only 0..1 can be served")
    normalised = config.get("do_normalize", True) and "image_mean" in config
    found: dict[str, Any] = {
        "mean": tuple(config["image_mean"]) if normalised else (0.0,),
        "std": tuple(config["image_std"]) if normalised else (1.0,),
    }
    if config.get("do_resize", True) and (rule := _resize_rule(config)):
        found |= {"resize": rule, "shape": rule.result}
    return found


def _resize_rule(config: Mapping[str, Any]) -> Resize | None:
    """The rule of a `preprocessor_config.json`; None where it yields no fixed size."""
    size, crop = config.get("size"), config.get("crop_size")
    size = {"height": size, "width": size} if isinstance(size, int) else size or {}
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop or {}
    edge = size.get("shortest_edge")
    rule: dict[str, Any]
    if config.get("do_center_crop", False) and crop:
        rule = {"size": edge or (size["height"], size["width"]), "crop": (crop["height"], crop["width"])}
    elif edge and "crop_pct" in config:  # ConvNext gives the result of the crop
        rule = {"size": int(edge / config["crop_pct"]), "crop": edge}
    elif "height" in size:
        rule = {"size": (size["height"], size["width"])}
    else:
        return None
    interpolation = {2: "bilinear", 3: "bicubic"}.get(config.get("resample", 2))
    try:
        return Resize.model_validate({**rule, "interpolation": interpolation, "antialias": True})
    except ValidationError as error:
        raise ManifestError(f"the resize rule of preprocessor_config.json cannot be served: {error}") from error


def _from_timm(name: str) -> dict[str, Any]:
    """What timm says of a model: size, normalisation and resize rule."""
    require_extra("timm")
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None:
        return {}
    _, height, width = config.input_size
    rule = None
    if config.crop_mode == "center" and height == width and config.interpolation in ("bilinear", "bicubic"):
        size = int(height / config.crop_pct)
        told = {"size": size, "crop": height, "interpolation": config.interpolation, "antialias": True}
        rule = Resize.model_validate(told)
    return {"shape": (height, width), "mean": tuple(config.mean), "std": tuple(config.std), "resize": rule}


class _Said(NamedTuple):
    """What nothing but the user or the architecture's own folder knows."""

    weights: Path
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def _said(told: Description) -> _Said:
    """What must be said; raises ManifestError with all that is not."""
    wanted = {
        "--weights FILE": (told.weights, "a .safetensors file, or a state dict saved by torch.save"),
        "--classes NAMES": (
            told.classes,
            "names in the order of the outputs: a,b,c, a file with one per line, or the "
            "folder of the training images with a folder per class",
        ),
        "--mean NUMBERS": (
            told.mean,
            "per channel, of pixels in 0..1, as in training; pretrained networks of "
            "torchvision: 0.485,0.456,0.406; none: 0",
        ),
        "--std NUMBERS": (told.std, "likewise; pretrained networks of torchvision: 0.229,0.224,0.225; none: 1"),
    }
    lacking = [f"{option}: {text}" for option, (value, text) in wanted.items() if not value]
    if told.weights and told.classes and told.mean and told.std:
        return _Said(told.weights, told.classes, told.mean, told.std)
    raise ManifestError(f"{told.architecture} alone does not say; give", lacking)


def _shape(net: nn.Module, told: Description) -> Shape:
    """Channels, height and width: as told, or found by what the network takes."""
    said = told.shape or (told.resize.result if told.resize else None)
    if said is not None and len(said) == 3:
        return said
    first = next((module for module in net.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None:
        raise ManifestError("the network has no convolution that would tell its channels; give --size CxHxW")
    if said is not None:
        return (first.in_channels, said[0], said[1])
    taken = possible_shapes(net)
    if len(taken) != 1:
        several = f"takes several sizes, such as {taken[0][1]} and {taken[-1][1]}" if taken else "takes no size tried"
        raise ManifestError(f"the network {several}; give the one it was trained with: --size 224, or --size HxW")
    return taken[0]


def _manifest(key: BundleKey, told: Description, said: _Said, anatomy: Anatomy, licence: str) -> Manifest:
    channels, height, width = anatomy.shape
    mean, std = (values * channels if len(values) == 1 else values for values in (said.mean, said.std))
    try:
        spec = InputSpec(channels=channels, height=height, width=width, mean=mean, std=std, resize=told.resize)
        return Manifest(
            schema_version=1,
            name=key.name,
            version=key.version or "",
            architecture=told.architecture,
            architecture_options=told.options,
            classifier=anatomy.classifier,
            input=spec,
            classes=said.classes,
            files={},
            metrics={} if told.accuracy is None else {"accuracy": told.accuracy},
            licence=licence,
            provenance=f"Weights of {said.weights.name} (sha256 {sha256(said.weights)}).",
        )
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc'])) or 'input'}: {item['msg']}" for item in error.errors()]
        raise ManifestError("the model cannot be described so; correct:", problems) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ArchitectureError(
            f"{path} cannot be read: {error.strerror}; transformers:DIR is a folder with it"
        ) from error
    except ValueError as error:
        raise ArchitectureError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ArchitectureError(f"{path} holds no JSON object")
    return content
