from pathlib import Path

import pytest
import torch

from acclimate_store import ArchitectureError
from acclimate_store.architectures import build
from acclimate_store.shallow_cnn import ShallowCNN

MODULE = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Flatten(), nn.Linear(width, 2))

def no_net():
    return [1, 2]

constant = 3
"""


@pytest.fixture
def edge_nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "edge_nets.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "edge_nets"


def test_the_shallow_cnn_has_the_tensors_of_the_papers_network() -> None:
    net = build("acclimate:shallow_cnn", {"num_classes": 7})
    assert isinstance(net, ShallowCNN)
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters() if p.dim() > 1}
    assert shapes == {
        "conv1.weight": (32, 1, 3, 3),
        "conv2.weight": (64, 32, 3, 3),
        "conv3.weight": (64, 64, 3, 3),
        "linear4.weight": (64, 576),
        "linear5.weight": (7, 64),
    }
    assert net.eval()(torch.zeros(2, 1, 28, 28)).shape == (2, 7)


def test_torchvision_builds_without_downloading_weights() -> None:
    net = build("torchvision:resnet18", {"num_classes": 5})
    assert net.get_submodule("fc").weight.shape == (5, 512)


@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_fpn", "fcn_resnet50", "r3d_18", "quantized_resnet18", "nothing"])
def test_torchvision_is_limited_to_classification(name: str) -> None:
    with pytest.raises(ArchitectureError, match="not a classification model"):
        build(f"torchvision:{name}", {})


def test_an_unknown_network_of_ours_names_those_there_are() -> None:
    with pytest.raises(ArchitectureError, match="there is shallow_cnn"):
        build("acclimate:deep_cnn", {})


def test_wrong_options_are_named() -> None:
    with pytest.raises(ArchitectureError, match=r"refuses architecture_options \{'depth': 3\}: TypeError"):
        build("acclimate:shallow_cnn", {"depth": 3})


def test_an_import_path_is_refused_unless_the_operator_allows_it(edge_nets: str) -> None:
    with pytest.raises(
        ArchitectureError, match=r"say so: --allow-import .*ALLOWED_IMPORTS.*; trusted so far: other:Net"
    ):
        build(f"{edge_nets}:Net", {"width": 4}, allowed_imports={"other:Net"})


def test_an_import_path_that_is_not_allowed_is_not_even_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_net.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ArchitectureError):
        build("hostile_net:Net", {})
    assert not (tmp_path / "ran").exists()


def test_an_allowed_import_path_is_built(edge_nets: str) -> None:
    net = build(f"{edge_nets}:Net", {"width": 4}, allowed_imports={f"{edge_nets}:Net"})
    assert net(torch.zeros(3, 1, 2, 2)).shape == (3, 2)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("edge_nets:no_net", "must return a torch.nn.Module, not list"),
        ("edge_nets:constant", "not callable"),
        ("edge_nets:Absent", "cannot import edge_nets:Absent"),
        ("no_such_module:Net", "cannot import no_such_module:Net"),
    ],
)
@pytest.mark.usefixtures("edge_nets")
def test_an_allowed_import_path_must_yield_a_network(path: str, message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        build(path, {}, allowed_imports={path})


@pytest.mark.parametrize("name", ["timm:resnet18", "transformers:resnet"])
def test_a_library_that_is_not_installed_is_an_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acclimate_store.architectures.find_spec", lambda package: None)
    package = name.partition(":")[0]
    with pytest.raises(ArchitectureError, match=rf'{package} is not installed; pip install "acclimate\[{package}\]"'):
        build(name, {})
