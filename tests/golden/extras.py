"""What a run yields, and what is compared with it beyond the logits, case by case. Loaded by check.py."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acclimate_adapters import Adapter, FrozenModel, Pass, State, create
from acclimate_adapters.balanced.client import deviations_of
from acclimate_adapters.balanced.moments import SourceMoments, by_layer, layer_widths
from acclimate_adapters.methods.fedthe.ensemble import Settings, mix_heads

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """What an adapter answered on all streams."""

    logits: np.ndarray  # [clients, batches, B, K]
    states: tuple[State, ...]  # each client's state after its last batch
    signals: tuple[tuple[Mapping[str, Any], ...], ...]  # by client and batch
    model: FrozenModel
    streams: Tensor  # [clients, batches, B, C, H, W]


@dataclass(frozen=True)
class Verdict:
    """One comparison."""

    what: str
    median: float
    maximum: float
    tolerance: str
    passed: bool


def run_adapter(
    adapter: Adapter,
    model: FrozenModel,
    streams: Tensor | Sequence[Sequence[Tensor]],
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
    return Run(torch.stack(logits).numpy(), tuple(states), tuple(signals), model, streams)


def verdict(what: str, differences: list[float], maximum: float, median: float | None = None) -> Verdict:
    """Judge differences by their maximum and, if given, their median."""
    measured = float(np.median(differences)), float(np.max(differences))
    passed = measured[1] <= maximum and (median is None or measured[0] <= median)  # NaN fails
    tolerance = f"{maximum:.0e}" if median is None else f"{median:.0e} / {maximum:.0e}"
    return Verdict(what, *measured, tolerance, passed)


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


def estimated_priors(keys: tuple[str, ...], tolerance: float) -> Callable[[Run, Arrays, str], Iterator[Verdict]]:
    """The class prior of each batch against each of some recorded arrays."""

    def extra(run: Run, expected: Arrays, precision: str) -> Iterator[Verdict]:
        got = np.array([[batch["prior"] for batch in client] for client in run.signals])
        for key in keys:
            yield verdict(key.replace("_", " "), np.abs(got - expected[key]).ravel().tolist(), tolerance)

    return extra


def balanced_clients(run: Run, expected: Arrays, precision: str) -> Iterator[Verdict]:
    """What `balanced` measures on the way and keeps, and its answers to a switch, to single and to identical images."""
    tolerance = 1e-8 if precision == "float64" else 1e-4

    def differences(what: str, got: Any, key: str) -> Verdict:
        return verdict(what, np.abs(np.asarray(got, dtype=np.float64) - expected[key]).ravel().tolist(), tolerance)

    def answers(batches: Sequence[Tensor], **hyperparameters: Any) -> Run:
        return run_adapter(create("balanced", **hyperparameters), run.model, [batches])

    for signal, key in {"label_shift": "g", **{k: k for k in ("evidence", "prior", "shrink", "restarted")}}.items():
        yield differences(signal.replace("_", " "), [[batch[signal] for batch in c] for c in run.signals], key)
    for kind in ("n", "classes", "style", "a1", "a2", "b1", "b2"):
        keys = [key for key in expected if key.split(".")[:2] == ["state", kind]]
        got = {key: np.array([balanced_state(run.model, state, key) for state in run.states]) for key in keys}
        both = (np.abs(got[key] - expected[key]).ravel() for key in keys)
        yield verdict(f"state.{kind}", np.concatenate(list(both)).tolist(), tolerance)
    switch = [*run.streams[0, :3], *run.streams[1, :3]]
    answer = answers(switch)
    yield differences("switch", answer.logits[0], "switch_logits_f64")
    yield differences("switch restarts", [batch["restarted"] for batch in answer.signals[0]], "switch_restarted")
    without = answers(switch, restart="off")
    yield differences("switch, no restart", without.logits[0], "switch_norestart_logits_f64")
    singles = answers(run.streams[0].flatten(0, 1)[:12].split(1))
    yield differences("single images", singles.logits[0, :, 0], "single_logits_f64")
    identical = answers([run.streams[2, 0, :1].expand(20, -1, -1, -1)] * 2)
    yield differences("identical images", identical.logits[0], "identical_logits_f64")


def balanced_state(model: FrozenModel, state: State, key: str) -> np.ndarray:
    """A recorded quantity of a client's state: n, sums of posteriors, or mean moments of a layer."""
    kind, _, layer = key.removeprefix("state.").partition(".")
    if layer:  # a1, a2: mean and mean square under H0; b1, b2: under H1
        deviations = state.tensors[deviations_of("h0" if kind[0] == "a" else "h1")]
        moments = SourceMoments.of(model).moments(deviations)
        return by_layer(moments, layer_widths(model))[layer][int(kind[1]) - 1].numpy()
    rows = state.tensors["rows"]
    posterior = {"n": torch.ones(()), "classes": state.tensors["h1.posterior"], "style": state.tensors["h0.posterior"]}
    return (rows * posterior[kind]).numpy()
