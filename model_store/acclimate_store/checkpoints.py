"""Weights that somebody saved in a file, read without running what the file says, and brought to a network's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from acclimate_store.errors import TensorError

WRAPPERS: Final = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "weights")
"""Where training programs put the weights in a file with other things (Lightning: `state_dict`)."""
_COMPILED: Final = "_orig_mod."
"""What `torch.compile` puts into the name of every tensor below the module that was compiled."""
_SHOWN: Final = 5
"""Most names in a message."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a file of weights holds.

    Args:
        path: of the file.
        tensors: by the names that they have in the file.
        notes: what was recognised, in words for the user.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a `.safetensors` file, or a state dict that `torch.save` wrote, alone or among other things.

    Raises:
        TensorError: it cannot be read, or holds no state dict; the message says how to save one.
    """
    if not path.is_file():
        raise TensorError(f"there is no file {path}")
    if path.suffix == ".safetensors":
        try:
            return Checkpoint(path, load_file(path))
        except SafetensorError as error:
            raise TensorError(f"{path} is not a safetensors file: {error}") from error
    content = _unpickled(path)
    notes = []
    if isinstance(content, Mapping):
        found = [key for key in WRAPPERS if isinstance(content.get(key), Mapping) and _holds_tensors(content[key])]
        if found and not _holds_tensors(content):
            others = sorted(str(key) for key in content if key != found[0])
            notes.append(f"the weights are in its {found[0]!r}; not taken: {_some(others)}" if others else "")
            content = content[found[0]]
    if not isinstance(content, Mapping) or not _holds_tensors(content):
        raise TensorError(
            f"{path} holds no state dict but {_kind(content)}; save one: torch.save(model.state_dict(), 'weights.pt')"
        )
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    left_out = sorted(str(name) for name in content if str(name) not in tensors)
    if left_out:
        notes.append(f"entries that are no tensors are left out: {_some(left_out)}")
    return Checkpoint(path, tensors, tuple(filter(None, notes)))


def load_checkpoint(net: nn.Module, checkpoint: Checkpoint, unused: Sequence[str] = ()) -> tuple[str, ...]:
    """Fill a network with the weights of a file.

    Recognised and said: a prefix that all names have (`module.` of DataParallel, `model.` of Lightning, any other),
    `_orig_mod.` of `torch.compile`, other precisions, and tensors beside the network's (of a loss or a metric).

    Args:
        net: the network.
        checkpoint: the weights.
        unused: what the names of tensors begin with that the network does without.

    Returns:
        What was done, in words for the user.

    Raises:
        TensorError: tensors are missing, unknown to the network, of another shape, or not finite.
    """
    expected = net.state_dict()
    notes = list(checkpoint.notes)
    tensors = {name.replace(_COMPILED, ""): tensor for name, tensor in checkpoint.tensors.items()}
    if any(_COMPILED in name for name in checkpoint.tensors):
        notes.append(f"{_COMPILED!r} of torch.compile is removed from the names")
    prefix = prefix_of(tensors, expected)
    if prefix:
        beside = sorted(name for name in tensors if not name.startswith(prefix))
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        notes.append(f"prefix {prefix!r} is removed from the names")
        if beside:
            notes.append(f"tensors without that prefix are left out: {_some(beside)}")
    training = sorted(name for name in tensors if name.startswith(tuple(unused)) and name not in expected)
    if training:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in training}
        notes.append(f"heads that only training uses are left out: {_some(training)}")
    counters = {name: tensor for name, tensor in expected.items() if name.endswith("num_batches_tracked")}
    tensors = counters | tensors  # files of old versions of torch do not have them, and nothing here uses them
    _refuse_misfits(checkpoint.path, tensors, expected)
    precisions = {str(t.dtype).removeprefix("torch.") for n, t in tensors.items() if t.dtype != expected[n].dtype}
    if precisions:
        notes.append(f"{', '.join(sorted(precisions))} is converted to float32")
    expected.update({name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()})
    net.load_state_dict(expected)  # and not `tensors`: layers look for the version numbers that a state dict carries
    return tuple(notes)


def prefix_of(names: Mapping[str, object], expected: Mapping[str, object]) -> str:
    """What stands before a network's names in a file; empty if nothing does, or if it is not the same everywhere."""
    needed = [name for name in expected if not name.endswith("num_batches_tracked")]
    if not needed or all(name in names for name in needed):
        return ""
    last = needed[-1]
    prefixes = sorted({name.removesuffix(last) for name in names if name.endswith(f".{last}")}, key=len)
    return next((prefix for prefix in prefixes if all(prefix + name in names for name in needed)), "")


def _unpickled(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise TensorError(
            f"{path} is a pickled object and not only tensors: reading it would run code from the file. Where you "
            "trust it, load it as you do today and save its weights alone: "
            "torch.save(model.state_dict(), 'weights.pt')"
            f"\n  torch says: {str(error).splitlines()[0]}"
        ) from error
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        if "TorchScript" in str(error):
            raise TensorError(
                f"{path} is a TorchScript archive; save its weights alone: "
                f"torch.save(torch.jit.load({path.name!r}).state_dict(), 'weights.pt')"
            ) from error
        raise TensorError(f"{path} cannot be read as a file of torch.save: {str(error).splitlines()[0]}") from error


def _refuse_misfits(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(found.keys() - expected.keys())
    shapes = [
        f"{name} has shape {[*found[name].shape]}, the architecture {[*expected[name].shape]}"
        for name in expected
        if name in found and found[name].shape != expected[name].shape
    ]
    unusable = [
        f"{name} holds NaN or infinite numbers"
        for name, tensor in found.items()
        if name in expected and not bool(torch.isfinite(tensor).all())
    ]
    hint = [] if missing or unknown else _class_counts(found, expected)
    problems = [*hint, *shapes[:_SHOWN], *unusable[:_SHOWN]]
    if len(shapes) > _SHOWN:
        problems.append(f"{len(shapes) - _SHOWN} more have another shape")
    if missing:
        problems.append(f"missing in the file: {_some(missing)}")
    if unknown:
        problems.append(f"unknown to the architecture: {_some(unknown)}")
    if problems:
        raise TensorError(f"the weights of {path} do not fit the architecture:", problems)


def _class_counts(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """What is probably wrong if nothing but the number of rows of a few tensors differs."""
    others = [name for name in expected if name in found and found[name].shape != expected[name].shape]
    counts = {(len(found[name]), len(expected[name])) for name in others if found[name].dim() and expected[name].dim()}
    same = all(found[name].shape[1:] == expected[name].shape[1:] for name in others)
    if len(counts) != 1 or not same or len(others) > 4:
        return []
    given, named = counts.pop()
    return [f"the weights are of {given} classes, and {named} are named: name all that it was trained on, in order"]


def _holds_tensors(content: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in content.values())


def _kind(content: Any) -> str:
    if isinstance(content, Mapping):
        return f"a dictionary with {_some(sorted(map(str, content)))}" if content else "an empty dictionary"
    return f"a {type(content).__name__}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
