"""Weights are read as training programs leave them; what is no state dict is refused with the way out."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from acclimate_store import TensorError
from acclimate_store.checkpoints import load_checkpoint, read_checkpoint


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return {name: torch.rand_like(t) if t.is_floating_point() else t for name, t in network().state_dict().items()}


def prefixed(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in weights.items()}


def loaded(path: Path) -> tuple[dict[str, Tensor], str]:
    net = network()
    notes = load_checkpoint(net, read_checkpoint(path))
    return net.state_dict(), "\n".join(notes)


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def test_safetensors_and_state_dicts_are_the_same(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, tmp_path / "w.safetensors")
    for path in (tmp_path / "w.safetensors", save(tmp_path / "w.pt", weights)):
        found, notes = loaded(path)
        assert notes == ""
        assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (lambda w: prefixed("module.", w), ["prefix 'module.' is removed"]),
        (lambda w: prefixed("_orig_mod.", w), ["'_orig_mod.' of torch.compile is removed"]),
        (lambda w: prefixed("module._orig_mod.", w), ["'_orig_mod.'", "prefix 'module.' is removed"]),
        (lambda w: {"epoch": 3, "model_state_dict": w}, ["the weights are in its 'model_state_dict'", "epoch"]),
        (
            lambda w: {
                "pytorch-lightning_version": "2.5",
                "state_dict": prefixed("model.", w) | {"criterion.weight": torch.ones(3)},
                "optimizer_states": [],
            },
            [
                "the weights are in its 'state_dict'; not taken: optimizer_states, pytorch-lightning_version",
                "prefix 'model.' is removed",
                "tensors without that prefix are left out: criterion.weight",
            ],
        ),
        (lambda w: {n: t for n, t in w.items() if "num_batches" not in n}, []),
    ],
)
def test_wrappers_and_prefixes_are_recognised_and_said(
    wrap: Any, words: list[str], tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    found, notes = loaded(save(tmp_path / "w.pt", wrap(weights)))
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert all(word in notes for word in words)
    assert bool(notes) == bool(words)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_converted_and_said(
    dtype: torch.dtype, tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    halves = {name: t.to(dtype) if t.is_floating_point() else t for name, t in weights.items()}
    found, notes = loaded(save(tmp_path / "w.pt", halves))
    assert notes == f"{str(dtype).removeprefix('torch.')} is converted to float32"
    assert found["3.weight"].dtype == torch.float32
    torch.testing.assert_close(found["3.weight"], halves["3.weight"].float())


class Trainer:
    """Something that a file must not bring to life."""


@pytest.mark.parametrize("content", [network(), {"state_dict": {}, "hyper": Namespace(lr=1)}, Trainer()])
def test_a_pickled_object_is_refused_with_the_way_out(content: Any, tmp_path: Path) -> None:
    with pytest.raises(TensorError, match=r"(?s)would run code from the file.*torch\.save\(model\.state_dict\(\)"):
        read_checkpoint(save(tmp_path / "model.pt", content))


def test_a_pickled_object_is_not_brought_to_life(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(tmp_path / "ran"), "w")

    with pytest.raises(TensorError):
        read_checkpoint(save(tmp_path / "model.pt", Hostile()))
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.jit.trace(network().eval(), torch.zeros(1, 1, 4, 4)).save(tmp_path / "model.pt")
    with pytest.raises(TensorError, match=r"TorchScript archive; save its weights alone"):
        read_checkpoint(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "lr": 0.1}, r"holds no state dict but a dictionary with epoch, lr; save one"),
        ([torch.zeros(3)], "holds no state dict but a list"),
        (torch.zeros(3), "holds no state dict but a Tensor"),
        ({}, "an empty dictionary"),
    ],
)
def test_other_content_is_named(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TensorError, match=message):
        read_checkpoint(save(tmp_path / "w.pt", content))


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_damaged_and_absent_files_are_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(TensorError, match="there is no file"):
        read_checkpoint(tmp_path / name)
    (tmp_path / name).write_bytes(b"nonsense")
    with pytest.raises(TensorError, match=name):
        read_checkpoint(tmp_path / name)


def test_everything_that_does_not_fit_is_said(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    del weights["0.bias"]
    weights["3.weight"] = torch.zeros(4, 8)
    weights["1.weight"][0] = torch.nan
    weights["extra"] = torch.zeros(1)
    with pytest.raises(TensorError) as raised:
        loaded(save(tmp_path / "w.pt", weights))
    assert raised.value.problems == (
        "3.weight has shape [4, 8], the architecture [3, 8]",
        "1.weight holds NaN or infinite numbers",
        "missing in the file: 0.bias",
        "unknown to the architecture: extra",
    )
