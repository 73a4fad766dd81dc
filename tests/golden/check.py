"""Compare the adapters, number by number, with recorded outputs of the papers' own programs (of ours for `balanced`).

    python tests/golden/check.py tests/golden/A
    python tests/golden/check.py DIR --network torchvision.models:resnet18

DIR holds a network (model.json, model.safetensors), streams of real images (stream.npz), hyper-parameters
(hparams.json), tolerances (tolerances.json) and `expected/<method>.npz`. Every expected file is run in float64, which
is sharp, and in float32, where a ReLU or pooling decision that flips within rounding moves a whole batch: there the
median over batches and the maximum have a tolerance each. One that cannot be run fails, and the others go on.

A network that is no row of layers is made by a function, `--network module:callable`, with the `arguments` of
model.json by name; model.json then needs no `layers`.
"""

import argparse
import importlib.util
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from acclimate_adapters import Adapter, FrozenModel, Source, create
from acclimate_adapters.methods.atp_training import average, refine


def _beside(name: str) -> ModuleType:
    """A module of this folder, which is no package: whether this file runs as a script or was loaded by its path."""
    spec = importlib.util.spec_from_file_location(f"golden_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


extras = _beside("extras")
Arrays, Run, Verdict = extras.Arrays, extras.Run, extras.Verdict
recorded_head, run_adapter, verdict = extras.recorded_head, extras.run_adapter, extras.verdict

HAND_MADE_TOLERANCE = {"float64_max_abs": 1e-8, "float32_median_over_batches_of_max_abs": 1e-4, "float32_max_abs": 5e-2}


@dataclass(frozen=True)
class Case:
    """How one expected file is reproduced, and which of its arrays is the reference in each precision."""

    adapter: Callable[[dict[str, Any]], Adapter]  # hyper-parameters of the file, and its layers by kind -> adapter
    rates: str = "rates.json"
    float64: str = "logits_f64"
    float32: str = "logits"
    extras: Callable[[Run, Arrays, str], Iterator[Verdict]] = lambda run, expected, precision: iter(())
    enrolment: Callable[[Path, int], Mapping[str, Tensor]] = lambda folder, client: {}  # keywords of `init`
    tolerance: Mapping[str, Any] = field(default_factory=dict)  # where the file cannot be met by tolerances.json


def fedthe(h: Mapping[str, Any], **changes: Any) -> Adapter:
    """FedTHE with recorded hyper-parameters."""
    return create("fedthe", **{name: h[name] for name in ("alpha", "beta", "steps", "lr") if name in h}, **changes)


# the features behind the recorded logits are float32 in either precision; `two_heads` has the sharp comparison
TWO_HEADS_TOLERANCE = {
    "compare": "logits",
    "float64_max_abs": 3e-4,
    "float32_max_abs": 3e-4,
    "float32_median_over_batches_of_max_abs": 3e-5,
}


def layers_of(net: nn.Module, kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of the layers of a kind."""
    return tuple(name for name, layer in net.named_modules() if isinstance(layer, kind))


EM_PRIORS = extras.estimated_priors(("prior", "prior_quapy"), 1e-5)
BBSE_PRIORS = extras.estimated_priors(("label_dist",), 1e-4)
ROW_CONSTANT = {"compare": "log-probabilities"}  # the reference normalises no rows
# no gradient amplifies a decision that flips
OWN_TOLERANCE = {"float64_max_abs": 1e-8, "float32_max_abs": 1e-4, "float32_median_over_batches_of_max_abs": 1e-4}

CASES: dict[str, Case] = {
    "none": Case(lambda h: create("none")),
    "atp_batch": Case(lambda h: create("atp", mode="batch")),
    "atp_online": Case(lambda h: create("atp", mode="online"), extras=extras.update_direction),
    "atp_batch_clamp": Case(
        lambda h: create("atp", mode="batch"), rates="rates_clamp.json", extras=extras.clamped_variances
    ),
    # the paper's order, average then clamp; the official program clamps each batch's model, then averages the models
    "atp_online_clamp": Case(
        lambda h: create("atp", mode="online"),
        rates="rates_clamp.json",
        float64="logits_mean_h_then_clamp_f64",
        float32="logits_mean_h_then_clamp_f64",
    ),
    # no paper's: recorded from the program with which this project's own method was developed
    "balanced": Case(lambda h: create("balanced"), extras=extras.balanced_clients, tolerance=OWN_TOLERANCE),
    # the official program inverts the confusion matrix and projects; the default is constrained least squares
    "bbse_hard": Case(lambda h: create("bbse", mode="hard", solver="pinv"), extras=BBSE_PRIORS, tolerance=ROW_CONSTANT),
    "bbse_soft": Case(lambda h: create("bbse", mode="soft", solver="pinv"), extras=BBSE_PRIORS, tolerance=ROW_CONSTANT),
    "bn_adapt": Case(lambda h: create("bn_adapt", prior_strength=h["prior_strength"])),
    "em": Case(lambda h: create("em", steps=h["epochs"]), extras=EM_PRIORS),
    # the official program lets priors vanish
    "em_converged": Case(lambda h: create("em", steps=h["epochs"], floor=1e-12), extras=EM_PRIORS),
    # recorded in float32 only. Not repeated: the official program averages the loss over a batch, which Adam's epsilon
    # feels, and stops all samples of a batch together; either way a sample's answer depends on its batch mates
    "fedthe_official": Case(
        lambda h: fedthe(h, history="official"),
        float64="logits",
        extras=extras.head_weights,
        enrolment=recorded_head,
        tolerance=TWO_HEADS_TOLERANCE,
    ),
    "fedthe_paper": Case(
        lambda h: fedthe(h), extras=extras.two_heads, enrolment=recorded_head, tolerance=TWO_HEADS_TOLERANCE
    ),
    # the official program has the authors' pseudo-labels only in their simplest form
    "shot": Case(lambda h: create("shot", lr=h["lr"], beta=h["beta"], centroids="soft")),
    "shot_pl": Case(lambda h: create("shot", lr=h["lr"], beta=h["beta"], centroids="soft")),
    "surgical": Case(lambda h: create("surgical", modules=h["modules"], lr=h["lr"])),
    "surgical_block2": Case(lambda h: create("surgical", modules=h["modules"], lr=h["lr"])),
    "t3a": Case(lambda h: create("t3a", filter_k=h["filter_k"])),
    "t3a_k5": Case(lambda h: create("t3a", filter_k=h["filter_k"])),
    # the official program trains BatchNorm2d only
    "tent": Case(lambda h: create("tent", lr=h["lr"], layers=h["batch_norm_2d"])),
    "tent_adam": Case(lambda h: create("tent", lr=h["lr"], optimizer="adam", layers=h["batch_norm_2d"])),
    "tent_lr2": Case(lambda h: create("tent", lr=h["lr"], layers=h["batch_norm_2d"])),
}


def build_network(description: Mapping[str, Any], network: str | None = None) -> nn.Module:
    """The network of a model.json: its layers in a row, or what a function makes; unnamed layers hold no tensors.

    Args:
        description: the content of model.json.
        network: the function as `module:callable`.
    """
    if network is not None:
        module, _, function = network.partition(":")
        made: nn.Module = getattr(importlib.import_module(module), function)(**description.get("arguments", {}))
        return made
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, layer in enumerate(description["layers"]):
        options = {k: v for k, v in layer.items() if k not in ("name", "type", "note")}
        layers[layer.get("name", f"layer{i}")] = getattr(nn, layer["type"])(**options)
    return nn.Sequential(layers)


def load_network(folder: Path, network: str | None = None) -> nn.Module:
    """The network of a directory with its weights, in evaluation mode."""
    net = build_network(json.loads((folder / "model.json").read_text()), network)
    missing, unexpected = net.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    if unexpected or any(not name.endswith("num_batches_tracked") for name in missing):
        raise ValueError(f"the network and model.safetensors do not fit: {missing} {unexpected}")
    return net.eval()


def load_model(folder: Path, rates_file: str, dtype: torch.dtype, network: str | None = None) -> FrozenModel:
    """The network of a directory with one of its rate files, if it has one, frozen."""
    net = load_network(folder, network)
    description = json.loads((folder / "model.json").read_text())
    rates = json.loads((folder / rates_file).read_text())["rates"] if (folder / rates_file).exists() else None
    classes = net.get_submodule(description["head"]).out_features
    prior = torch.full((classes,), 1 / classes, dtype=torch.float64)
    source = Source(prior=prior, rates=rates, **source_quantities(folder))
    return FrozenModel.from_module(net.to(dtype), classifier=description["head"], source=source)


def source_quantities(folder: Path) -> dict[str, Any]:
    """What else the directory says about the source."""
    quantities: dict[str, Any] = {}
    if (folder / "bbse.npz").exists():
        counts = {mode: np.load(folder / "bbse.npz")[f"counts_{mode}"].astype(np.float64) for mode in ("soft", "hard")}
        quantities["confusion"] = {mode: array / array.sum(axis=0) for mode, array in counts.items()}
    if (folder / "balanced_source.npz").exists():
        arrays = np.load(folder / "balanced_source.npz")
        quantities["moments"] = {name: torch.from_numpy(arrays[name]) for name in arrays if "." in name}
    if (folder / "fedthe.npz").exists():
        quantities["descriptor"] = np.load(folder / "fedthe.npz")["h_global"]
    return quantities


def load_streams(folder: Path, dtype: torch.dtype) -> Tensor:
    """Normalised images [clients, batches, B, C, H, W]; normalised in float32 whatever the precision of the run."""
    return normalise(folder, np.load(folder / "stream.npz")["images"]).to(dtype)


def normalise(folder: Path, pixels: np.ndarray) -> Tensor:
    """uint8 pixels [clients, batches, B, H, W] or [clients, batches, B, C, H, W] as float32 network input."""
    spec = json.loads((folder / "model.json").read_text())["input"]
    images = torch.from_numpy(pixels)
    images = images.unsqueeze(3) if images.dim() == 5 else images
    mean, std = (torch.tensor(spec[key], dtype=torch.float32).reshape(-1, 1, 1) for key in ("mean", "std"))
    return (images.float() / 255 - mean) / std


def compare(run: Run, expected: np.ndarray, tolerance: Mapping[str, Any], precision: str) -> Verdict:
    """Judge the logits, probabilities or log-probabilities of a run batch by batch."""
    quantity = tolerance.get("compare", "logits")
    got, want = run.logits.astype(np.float64), expected.astype(np.float64)
    scale = {"probabilities": torch.softmax, "log-probabilities": torch.log_softmax}.get(quantity)
    if scale is not None:
        got, want = (scale(torch.from_numpy(x), -1).numpy() for x in (got, want))
    per_batch = np.abs(got - want).max(axis=(-1, -2)).ravel().tolist()
    if precision == "float64":
        return verdict(quantity, per_batch, tolerance["float64_max_abs"])
    return verdict(
        quantity, per_batch, tolerance["float32_max_abs"], tolerance["float32_median_over_batches_of_max_abs"]
    )


def check_training(folder: Path, precision: str, network: str | None = None) -> Iterator[Verdict]:
    """Adaptation rates learned from labelled batches: each client's, and their mean."""
    recorded = np.load(folder / "expected/atp_train.npz")
    tolerance, suffix = (1e-8, "_f64") if precision == "float64" else (1e-5, "")
    model = load_model(folder, "rates.json", getattr(torch, precision), network)
    streams, labels = normalise(folder, recorded["images"][:, None])[:, 0], torch.from_numpy(recorded["labels"])
    for start in ("zero", "half"):
        clients = []
        for x, y in zip(streams.to(model.dtype), labels, strict=True):
            rates = dict(zip(recorded["modules"].tolist(), recorded[f"start_{start}"].tolist(), strict=True))
            for batch in torch.arange(len(y)).split(int(recorded["batch_size"])):
                rates = refine(model, rates, x[batch], y[batch], float(recorded["lr"]))
            clients.append(rates)
        got = np.array([list(rates.values()) for rates in clients])
        yield verdict(
            f"rates from {start}", np.abs(got - recorded[f"after_{start}{suffix}"]).ravel().tolist(), tolerance
        )
        mean = np.array(list(average(clients).values()))
        server = np.abs(mean - recorded[f"server_average_{start}_f64"]).tolist()
        yield verdict(f"mean rates from {start}", server, tolerance)


def check_file(folder: Path, name: str, precision: str, network: str | None = None) -> Iterator[Verdict]:
    """All verdicts on one expected file in one precision."""
    if name == "atp_train":
        yield from check_training(folder, precision, network)
        return
    case, dtype = CASES[name], getattr(torch, precision)
    recorded = json.loads((folder / "hparams.json").read_text())
    hyperparameters = recorded.get(name, recorded.get(name.split("_")[0], {}))
    tolerances = json.loads((folder / "tolerances.json").read_text())
    expected = np.load(folder / "expected" / f"{name}.npz")
    model = load_model(folder, case.rates, dtype, network)
    streams = load_streams(folder, dtype)
    kinds = {"batch_norm_2d": layers_of(load_network(folder, network), nn.BatchNorm2d)}
    adapter = case.adapter({**hyperparameters, **kinds})
    run = run_adapter(adapter, model, streams, lambda client: case.enrolment(folder, client))
    tolerance = {**tolerances.get(name, HAND_MADE_TOLERANCE), **case.tolerance}
    yield compare(run, expected[getattr(case, precision)], tolerance, precision)
    yield from case.extras(run, expected, precision)


def attempted(folder: Path, name: str, precision: str, network: str | None) -> Iterator[Verdict]:
    """As `check_file`; what it raises is a verdict, too."""
    try:
        yield from check_file(folder, name, precision, network)
    except Exception as error:
        yield Verdict(f"{type(error).__name__}: {error}", math.nan, math.nan, "", False)


def main(arguments: list[str] | None = None) -> int:
    """Check every expected file of a directory; 0 when all that can be checked passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--network", metavar="MODULE:CALLABLE", help="what makes the network")
    given = parser.parse_args(arguments)
    folder: Path = given.folder
    torch.set_num_threads(1)
    files = sorted(path.stem for path in (folder / "expected").glob("*.npz"))
    if not files:
        print(f"{folder / 'expected'} holds no .npz files", file=sys.stderr)
        return 2
    print(f"{'file':<18}{'precision':<11}{'quantity':<28}{'median':>9}{'maximum':>10}  {'tolerance':<16}verdict")
    failed = 0
    known = CASES.keys() | {"atp_train"}
    for name in (name for name in files if name in known):
        for precision in ("float64", "float32"):
            for v in attempted(folder, name, precision, given.network):
                failed += not v.passed
                word = "pass" if v.passed else "FAIL"
                numbers = f"{v.median:9.1e}{v.maximum:10.1e}  {v.tolerance:<16}"
                print(f"{name:<18}{precision:<11}{v.what:<28}{numbers}{word}", flush=True)
    absent = [name for name in files if name not in known]
    if absent:
        print(f"missing (no adapter for them): {', '.join(absent)}")
    print(f"{failed} comparison(s) failed" if failed else "all comparisons passed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
