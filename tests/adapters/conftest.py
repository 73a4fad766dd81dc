"""A real network with everything a source can carry, and real image streams."""

import copy
import importlib.util
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from acclimate_adapters import Anchors, FrozenModel, Source, Step, create
from acclimate_adapters.balanced.moments import source_moments

GOLDEN = Path(__file__).parents[1] / "golden"


def _load_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_check", GOLDEN / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden() -> ModuleType:
    """The golden checker as a module."""
    return _load_check()


@pytest.fixture(scope="session")
def streams(golden: ModuleType) -> Tensor:
    """Real images [3 clients, 6 batches, 20, 1, 28, 28], normalised."""
    result: Tensor = golden.load_streams(GOLDEN / "A", torch.float32)
    return result


@pytest.fixture(scope="session")
def network(golden: ModuleType) -> nn.Module:
    """The trained network of the streams."""
    net: nn.Module = golden.build_network(json.loads((GOLDEN / "A/model.json").read_text()))
    net.load_state_dict(load_file(GOLDEN / "A/model.safetensors"), strict=False)
    return net.eval()


@pytest.fixture(scope="session")
def source_quantities(network: nn.Module, golden: ModuleType) -> Mapping[str, Any]:
    """Every quantity a source can carry, by name: those of the golden data, prototypes and anchors from its images."""
    counts = np.load(GOLDEN / "A/bbse.npz")
    fedthe = np.load(GOLDEN / "A/fedthe.npz")
    labels = torch.from_numpy(fedthe["local_labels"].reshape(-1))
    images = torch.from_numpy(fedthe["local_images"].reshape(-1, 1, 28, 28)).float().div(255).sub(0.286).div(0.353)
    rates = json.loads((GOLDEN / "A/rates.json").read_text())["rates"]
    bare = FrozenModel.from_module(network, classifier="linear5", source=Source(prior=torch.full((10,), 0.1)))
    features = bare.frozen(images).features
    return {
        "prior": torch.full((10,), 0.1),
        "rates": rates,
        "confusion": {mode: _columns_to_one(counts[f"counts_{mode}"]) for mode in ("soft", "hard")},
        "prototypes": torch.stack([features[labels == k].mean(0) for k in range(10)]),
        "descriptor": torch.from_numpy(fedthe["h_global"]),
        "anchors": Anchors(images[:100], labels[:100]),
        "moments": golden.source_quantities(GOLDEN / "A")["moments"],
    }


def _columns_to_one(counts: np.ndarray) -> Tensor:
    return torch.from_numpy(counts / counts.sum(0, keepdims=True))


@pytest.fixture(scope="session")
def make_model(network: nn.Module, source_quantities: Mapping[str, Any]) -> Callable[..., FrozenModel]:
    """Freeze the network with some source quantities changed: `make_model(rates={})`."""

    def make(**changes: Any) -> FrozenModel:
        return FrozenModel.from_module(network, classifier="linear5", source=Source(**{**source_quantities, **changes}))

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., FrozenModel]) -> FrozenModel:
    """The network with everything a source can carry."""
    return make_model()


@pytest.fixture
def cuda_model(
    network: nn.Module, source_quantities: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> FrozenModel:
    """The network on a CUDA device, where products keep all digits of single precision."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    for products in (torch.backends.cuda.matmul, torch.backends.cudnn.conv):
        monkeypatch.setattr(products, "fp32_precision", "ieee")  # no TF32
    net = copy.deepcopy(network).cuda()
    return FrozenModel.from_module(net, classifier="linear5", source=Source(**source_quantities))


@pytest.fixture(scope="session")
def logit_model() -> Callable[..., FrozenModel]:
    """A model in float64 whose features and logits are its input [B, K]: `logit_model([0.5, 0.5], confusion=...)`."""

    def make(prior: Any, dtype: torch.dtype = torch.float64, **source: Any) -> FrozenModel:
        prior = torch.as_tensor(prior, dtype=torch.float64)
        net = nn.Sequential(OrderedDict(head=nn.Linear(len(prior), len(prior), bias=False)))
        net.head.weight.data = torch.eye(len(prior))
        return FrozenModel.from_module(net.to(dtype), classifier="head", source=Source(prior=prior, **source))

    return make


@pytest.fixture(scope="session")
def double_model(golden: ModuleType) -> FrozenModel:
    """The network in double precision, for oracles that are compared digit by digit."""
    result: FrozenModel = golden.load_model(GOLDEN / "A", "rates.json", torch.float64)
    return result


@pytest.fixture(scope="session")
def follow() -> Callable[..., list[Step]]:
    """The steps of a fresh client: `follow("balanced", model, batches, memory=0.9)`."""

    def steps(name: str, model: FrozenModel, batches: Iterable[Tensor], **hyperparameters: Any) -> list[Step]:
        adapter = create(name, **hyperparameters)
        state, taken = adapter.init(model), []
        for batch in batches:
            taken.append(adapter.step(model, state, batch))
            state = taken[-1].state
        return taken

    return steps


@pytest.fixture(scope="session")
def small_net() -> Callable[..., nn.Sequential]:
    """BatchNorm over maps and over vectors, with running statistics unlike the moments of `small_rows`."""

    def make(classes: int = 3, dtype: torch.dtype = torch.float64) -> nn.Sequential:
        generator = torch.Generator().manual_seed(5)
        body = OrderedDict(bn1=nn.BatchNorm2d(2), relu1=nn.ReLU(), flat=nn.Flatten(), linear=nn.Linear(18, 5))
        tail = OrderedDict(bn2=nn.BatchNorm1d(5), relu2=nn.ReLU(), head=nn.Linear(5, classes))
        net = nn.Sequential(body | tail)
        for tensor in net.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.7)
        for norm in (net.bn1, net.bn2):
            norm.running_var.abs_().add_(0.3)
        return net.eval().to(dtype)

    return make


@pytest.fixture(scope="session")
def small_rows() -> Callable[..., tuple[Tensor, Tensor]]:
    """Images for `small_net` whose mean depends on their class, and their classes: `small_rows(20, seed=1)`."""

    def make(n: int, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(n) % classes
        images = torch.randn(n, 2, 3, 3, generator=generator, dtype=torch.float64)
        return images + labels.reshape(-1, 1, 1, 1) * torch.tensor([0.6, -0.4]).reshape(1, 2, 1, 1), labels

    return make


@pytest.fixture(scope="session")
def small_model(small_net: Any, small_rows: Any) -> Callable[..., FrozenModel]:
    """`small_net`, or another network, with the moments of `small_rows`, some of them changed."""

    def make(net: nn.Module | None = None, prior: Any = (0.5, 0.3, 0.2), **changes: Any) -> FrozenModel:
        net, weights = net or small_net(len(prior)), torch.tensor(prior, dtype=torch.float64)
        bare = FrozenModel.from_module(net, classifier="head", source=Source(prior=weights))
        moments = source_moments(bare, [small_rows(40 * len(prior), len(prior), seed=9)])
        source = Source(prior=weights, moments={**moments, **changes})
        return FrozenModel.from_module(net, classifier="head", source=source)

    return make
