"""Compare the adapters, number by number, with recorded outputs of the papers' own programs.

    python tests/golden/check.py tests/golden/A

DIR holds a network (model.json, model.safetensors), streams of real images (stream.npz), hyper-parameters
(hparams.json), tolerances (tolerances.json) and `expected/<method>.npz`. Every expected file is run in float64, which
is sharp, and in float32, where a ReLU or pooling decision that flips within rounding moves a whole batch: there the
median over batches and the maximum have a tolerance each.
"""

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from acclimate_adapters import Adapter, FrozenModel, Pass, Source, State, create
from acclimate_adapters.fedthe import Settings, mix_heads

Arrays = Mapping[str, np.ndarray]
HAND_MADE_TOLERANCE = {"float64_max_abs": 1e-8, "float32_median_over_batches_of_max_abs": 1e-4, "float32_max_abs": 5e-2}


@dataclass(frozen=True)
class Case:
    """How one expected file is reproduced, and which of its arrays is the reference in each precision."""

    adapter: Callable[[dict[str, Any]], Adapter]  # hyper-parameters of the file -> adapter
    rates: str = "rates.json"
    float64: str = "logits_f64"
    float32: str = "logits"
    extras: Callable[["Run", Arrays, str], Iterator["Verdict"]] = lambda run, expected, precision: iter(())
    enrolment: Callable[[Path, int], Mapping[str, Tensor]] = lambda folder, client: {}  # keywords of `init`
    tolerance: Mapping[str, Any] = field(default_factory=dict)  # where the file cannot be met by tolerances.json


@dataclass(frozen=True)
class Run:
    """What an adapter answered on all streams."""

    logits: np.ndarray  # [clients, batches, B, K]
    states: tuple[State, ...]  # each client's state after its last batch
    signals: tuple[tuple[Mapping[str, Any], ...], ...]  # by client and batch
    model: FrozenModel


@dataclass(frozen=True)
class Verdict:
    """One comparison."""

    what: str
    median: float
    maximum: float
    tolerance: str
    passed: bool


def update_direction(run: Run, expected: Arrays, precision: str) -> Iterator[Verdict]:
    """The averaged direction after the last batch: its norms and first entries by module."""
    norm_key = "h_mean_l2_f64" if precision == "float64" else "h_mean_l2"
    norms, entries = [], []
    for client, state in enumerate(run.states):
        for m, module in enumerate(expected["modules"]):
            h = state.tensors[str(module)].double().flatten()
            norms.append(abs(float(h.norm()) / expected[norm_key][client, m] - 1))
            reference = expected["h_mean_first5"][client, m, : len(h[:5])]  # recorded from the float32 run
            entries.append(float(np.abs(h[:5].numpy() - reference).max()))
    yield verdict("direction norm (relative)", norms, 1e-8 if precision == "float64" else 1e-3)
    yield verdict("direction entries", entries, 1e-3)


def clamped_variances(run: Run, expected: Arrays, precision: str) -> Iterator[Verdict]:
    """How many variances each batch clamped."""
    counted = np.array([[batch["clamped_variances"] for batch in client] for client in run.signals])
    yield verdict("clamped variances", np.abs(counted - expected["clamped_entries"]).ravel().tolist(), 0)


def recorded_head(folder: Path, client: int) -> Mapping[str, Tensor]:
    """The personal head and local descriptor that the reference used for a client."""
    arrays = np.load(folder / "fedthe.npz")
    names = {"personal_head": "personal_head", "descriptor": "h_local"}
    return {name: torch.from_numpy(arrays[key][client]) for name, key in names.items()}


def head_weights(run: Run, expected: Arrays, precision: str) -> Iterator[Verdict]:
    """Weight of the global head for each sample."""
    got = np.array([[batch["global_weight"] for batch in client] for client in run.signals])
    yield verdict("weight of the global head", np.abs(got - expected["e"]).ravel().tolist(), 1e-4)


def two_heads(run: Run, expected: Arrays, precision: str) -> Iterator[Verdict]:
    """Weight, similarity and history of the two heads, and the rule by itself on the recorded features."""
    yield from head_weights(run, expected, precision)
    got = np.array([[batch["similarity"] for batch in client] for client in run.signals])
    yield verdict("similarity of the heads", np.abs(got - expected["similarity"]).ravel().tolist(), 1e-5)
    histories = torch.stack([state.tensors["history"] for state in run.states]).numpy()
    yield verdict("history after the stream", np.abs(histories - expected["final_history"]).ravel().tolist(), 1e-5)
    if precision == "float64":
        yield verdict("weight, recorded features", list(recorded_feature_differences(run, expected)), 1e-8)


def recorded_feature_differences(run: Run, expected: Arrays) -> Iterator[float]:
    """By client: largest difference of the weights when the rule starts from the recorded float32 features."""
    for client, state in enumerate(run.states):
        recorded = (expected[name][client] for name in ("features", "global_logits"))
        frozen = Pass(*(torch.from_numpy(array).double().flatten(0, 1) for array in recorded))
        fresh = replace(state, tensors={**state.tensors, "samples": torch.tensor(0)})
        mixture, _ = mix_heads(run.model, fresh, frozen, Settings(alpha=0.1, beta=0.3, steps=20, lr=0.1))
        yield float(np.abs(mixture.weight.numpy() - expected["e_f64"][client].ravel()).max())


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


def estimated_priors(keys: tuple[str, ...], tolerance: float) -> Callable[[Run, Arrays, str], Iterator[Verdict]]:
    """The class prior of each batch against each of some recorded arrays."""

    def extra(run: Run, expected: Arrays, precision: str) -> Iterator[Verdict]:
        got = np.array([[batch["prior"] for batch in client] for client in run.signals])
        for key in keys:
            yield verdict(key.replace("_", " "), np.abs(got - expected[key]).ravel().tolist(), tolerance)

    return extra


EM_PRIORS = estimated_priors(("prior", "prior_quapy"), 1e-5)
BBSE_PRIORS = estimated_priors(("label_dist",), 1e-4)
ROW_CONSTANT = {"compare": "log-probabilities"}  # the reference normalises no rows
BATCH_NORM_2D = ("bn1", "bn2", "bn3")

CASES: dict[str, Case] = {
    "none": Case(lambda h: create("none")),
    "atp_batch": Case(lambda h: create("atp", mode="batch")),
    "atp_online": Case(lambda h: create("atp", mode="online"), extras=update_direction),
    "atp_batch_clamp": Case(lambda h: create("atp", mode="batch"), rates="rates_clamp.json", extras=clamped_variances),
    # the paper's order, average then clamp; the official program clamps each batch's model, then averages the models
    "atp_online_clamp": Case(
        lambda h: create("atp", mode="online"),
        rates="rates_clamp.json",
        float64="logits_mean_h_then_clamp_f64",
        float32="logits_mean_h_then_clamp_f64",
    ),
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
        extras=head_weights,
        enrolment=recorded_head,
        tolerance=TWO_HEADS_TOLERANCE,
    ),
    "fedthe_paper": Case(fedthe, extras=two_heads, enrolment=recorded_head, tolerance=TWO_HEADS_TOLERANCE),
    # the official program has the authors' pseudo-labels only in their simplest form
    "shot": Case(lambda h: create("shot", lr=h["lr"], beta=h["beta"], centroids="soft")),
    "shot_pl": Case(lambda h: create("shot", lr=h["lr"], beta=h["beta"], centroids="soft")),
    "surgical": Case(lambda h: create("surgical", modules=h["modules"], lr=h["lr"])),
    "surgical_block2": Case(lambda h: create("surgical", modules=h["modules"], lr=h["lr"])),
    "t3a": Case(lambda h: create("t3a", filter_k=h["filter_k"])),
    "t3a_k5": Case(lambda h: create("t3a", filter_k=h["filter_k"])),
    # the official program trains BatchNorm2d only; bn4 is a BatchNorm1d
    "tent": Case(lambda h: create("tent", lr=h["lr"], layers=BATCH_NORM_2D)),
    "tent_adam": Case(lambda h: create("tent", lr=h["lr"], optimizer="adam", layers=BATCH_NORM_2D)),
    "tent_lr2": Case(lambda h: create("tent", lr=h["lr"], layers=BATCH_NORM_2D)),
}


def build_network(description: Mapping[str, Any]) -> nn.Sequential:
    """A sequential network from the layer list of a model.json; unnamed layers hold no tensors."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, layer in enumerate(description["layers"]):
        options = {k: v for k, v in layer.items() if k not in ("name", "type", "note")}
        layers[layer.get("name", f"layer{i}")] = getattr(nn, layer["type"])(**options)
    return nn.Sequential(layers)


def load_model(folder: Path, rates_file: str, dtype: torch.dtype) -> FrozenModel:
    """The network of a directory with one of its rate files."""
    description = json.loads((folder / "model.json").read_text())
    net = build_network(description)
    missing, unexpected = net.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    if unexpected or any(not name.endswith("num_batches_tracked") for name in missing):
        raise SystemExit(f"{folder}: model.json and model.safetensors do not fit: {missing} {unexpected}")
    rates = json.loads((folder / rates_file).read_text())["rates"]
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
    if (folder / "fedthe.npz").exists():
        quantities["descriptor"] = np.load(folder / "fedthe.npz")["h_global"]
    return quantities


def load_streams(folder: Path, dtype: torch.dtype) -> Tensor:
    """Normalised images [clients, batches, B, C, H, W]; normalised in float32 whatever the precision of the run."""
    spec = json.loads((folder / "model.json").read_text())["input"]
    images = torch.from_numpy(np.load(folder / "stream.npz")["images"])
    images = images.unsqueeze(3) if images.dim() == 5 else images
    mean, std = (torch.tensor(spec[key], dtype=torch.float32).reshape(-1, 1, 1) for key in ("mean", "std"))
    return ((images.float() / 255 - mean) / std).to(dtype)


def run_adapter(
    adapter: Adapter,
    model: FrozenModel,
    streams: Tensor,
    enrolment: Callable[[int], Mapping[str, Tensor]] = lambda c: {},
) -> Run:
    """Answer every client's batches in order, each client from a fresh state."""
    logits, states, signals = [], [], []
    for client, stream in enumerate(streams):
        state, answers, measured = adapter.init(model, **enrolment(client)), [], []
        for batch in stream:
            step = adapter.step(model, state, batch)
            state = step.state
            answers.append(step.logits)
            measured.append(step.signals)
        logits.append(torch.stack(answers))
        states.append(state)
        signals.append(tuple(measured))
    return Run(torch.stack(logits).numpy(), tuple(states), tuple(signals), model)


def verdict(what: str, differences: list[float], maximum: float, median: float | None = None) -> Verdict:
    """Judge differences by their maximum and, if given, their median."""
    measured = float(np.median(differences)), float(np.max(differences))
    passed = measured[1] <= maximum and (median is None or measured[0] <= median)  # NaN fails
    tolerance = f"{maximum:.0e}" if median is None else f"{median:.0e} / {maximum:.0e}"
    return Verdict(what, *measured, tolerance, passed)


def compare(run: Run, expected: np.ndarray, tolerance: Mapping[str, Any], precision: str) -> Verdict:
    """Judge the logits, probabilities or log-probabilities of a run batch by batch."""
    quantity = tolerance.get("compare", "logits")
    got, want = run.logits.astype(np.float64), expected.astype(np.float64)
    normalise = {"probabilities": torch.softmax, "log-probabilities": torch.log_softmax}.get(quantity)
    if normalise is not None:
        got, want = (normalise(torch.from_numpy(x), -1).numpy() for x in (got, want))
    per_batch = np.abs(got - want).max(axis=(-1, -2)).ravel().tolist()
    if precision == "float64":
        return verdict(quantity, per_batch, tolerance["float64_max_abs"])
    return verdict(
        quantity, per_batch, tolerance["float32_max_abs"], tolerance["float32_median_over_batches_of_max_abs"]
    )


def check_file(folder: Path, name: str, precision: str) -> Iterator[Verdict]:
    """All verdicts on one expected file in one precision."""
    case, dtype = CASES[name], getattr(torch, precision)
    recorded = json.loads((folder / "hparams.json").read_text())
    hyperparameters = recorded.get(name, recorded.get(name.split("_")[0], {}))
    tolerances = json.loads((folder / "tolerances.json").read_text())
    expected = np.load(folder / "expected" / f"{name}.npz")
    model = load_model(folder, case.rates, dtype)
    streams = load_streams(folder, dtype)
    run = run_adapter(case.adapter(hyperparameters), model, streams, lambda client: case.enrolment(folder, client))
    tolerance = {**tolerances.get(name, HAND_MADE_TOLERANCE), **case.tolerance}
    yield compare(run, expected[getattr(case, precision)], tolerance, precision)
    yield from case.extras(run, expected, precision)


def main(arguments: list[str] | None = None) -> int:
    """Check every expected file of a directory; 0 when all that can be checked passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args(arguments).folder
    torch.set_num_threads(1)
    files = sorted(path.stem for path in (folder / "expected").glob("*.npz"))
    if not files:
        print(f"{folder / 'expected'} holds no .npz files", file=sys.stderr)
        return 2
    print(f"{'file':<18}{'precision':<11}{'quantity':<28}{'median':>9}{'maximum':>10}  {'tolerance':<16}verdict")
    failed = 0
    for name in (name for name in files if name in CASES):
        for precision in ("float64", "float32"):
            for v in check_file(folder, name, precision):
                failed += not v.passed
                word = "pass" if v.passed else "FAIL"
                numbers = f"{v.median:9.1e}{v.maximum:10.1e}  {v.tolerance:<16}"
                print(f"{name:<18}{precision:<11}{v.what:<28}{numbers}{word}", flush=True)
    absent = [name for name in files if name not in CASES]
    if absent:
        print(f"missing (no adapter for them): {', '.join(absent)}")
    print(f"{failed} comparison(s) failed" if failed else "all comparisons passed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
