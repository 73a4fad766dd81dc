"""`balanced` against a transcription of its rule in NumPy and scalar loops, and each equation by itself."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from acclimate_adapters import (
    FrozenModel,
    Step,
    create,
)
from acclimate_adapters.balanced.client import deviations_of
from acclimate_adapters.balanced.measures import label_shift_evidence, log_sigmoid, map_em
from acclimate_adapters.balanced.moments import SourceMoments

Rows = Callable[..., tuple[Tensor, Tensor]]
Models = Callable[..., FrozenModel]
Follow = Callable[..., list[Step]]


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Oracle:
    """The rule step by step, with sums instead of means, for the small network."""

    def __init__(self, model: FrozenModel, memory: float = 1.0, restart: bool = True) -> None:
        self.memory, self.restart = memory, restart
        self.t = {name: model.tensor(name).numpy() for name in model.modules}
        self.ps = model.source.prior.numpy()
        self.k = len(self.ps)
        self.mu, self.sq, self.omega, self.m1, self.m2, self.v = {}, {}, {}, {}, {}, {}
        for layer in ("bn1", "bn2"):
            moment = {n: model.source.moments[f"{layer}.{n}"].double().numpy() for n in ("class_mean", "class_square")}
            self.mu[layer], self.sq[layer] = moment["class_mean"], moment["class_square"]
            self.omega[layer] = model.source.moments[f"{layer}.row_var"].double().numpy()
            self.m1[layer] = sum(self.ps[k] * self.mu[layer][k] for k in range(self.k))
            self.m2[layer] = sum(self.ps[k] * self.sq[layer][k] for k in range(self.k))
            self.v[layer] = self.m2[layer] - self.m1[layer] ** 2 + 1e-12
        self.reset()

    def reset(self) -> None:
        self.n, self.classes, self.style = 0.0, np.zeros(self.k), np.zeros(self.k)
        zeros = {layer: np.zeros(len(self.omega[layer])) for layer in ("bn1", "bn2")}
        self.a1, self.a2, self.b1, self.b2 = (dict(zeros) for _ in range(4))

    def normalise(self, layer: str, x: np.ndarray, d1: np.ndarray, d2: np.ndarray, m: float) -> np.ndarray:
        out = np.empty_like(x)
        for c in range(x.shape[1]):
            first, second = self.m1[layer][c] + d1[c], self.m2[layer][c] + d2[c]
            rho = min(max((second - first**2 + 1e-12) / self.v[layer][c], 0.05), 20.0)
            mean = self.t[f"{layer}.running_mean"][c] + m * d1[c]
            variance = self.t[f"{layer}.running_var"][c] * (1 + m * (rho - 1))
            scale = self.t[f"{layer}.weight"][c] / math.sqrt(variance + 1e-5)
            out[:, c] = (x[:, c] - mean) * scale + self.t[f"{layer}.bias"][c]
        return out

    def forward(self, x: np.ndarray, norm: Callable[[str, np.ndarray], np.ndarray]) -> np.ndarray:
        z = np.maximum(norm("bn1", x), 0).reshape(len(x), -1)
        z = z @ self.t["linear.weight"].T + self.t["linear.bias"]
        z = np.maximum(norm("bn2", z), 0)
        return log_softmax(z @ self.t["head.weight"].T + self.t["head.bias"])

    @staticmethod
    def row_sums(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flat = x.reshape(x.shape[0], x.shape[1], -1)
        return flat.mean(2).sum(0), (flat**2).mean(2).sum(0)

    def style_pass(self, x: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
        a1, a2, n = {}, {}, self.n + len(x)

        def norm(layer: str, z: np.ndarray) -> np.ndarray:
            a, b = self.row_sums(z)
            a1[layer], a2[layer] = self.a1[layer] + a, self.a2[layer] + b
            d1, d2 = a1[layer] / n - self.m1[layer], a2[layer] / n - self.m2[layer]
            return self.normalise(layer, z, d1, d2, n / (n + 20))

        return self.forward(x, norm), a1, a2

    def em(self, lp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p = (self.classes + 20 * self.ps) / (self.n + 20)
        for _ in range(5):
            r = np.exp(log_softmax(lp + np.log(p / self.ps)))
            p = (self.classes + r.sum(0) + 20 * self.ps) / (self.n + len(lp) + 20)
        return p, np.exp(log_softmax(lp + np.log(p / self.ps)))

    def evidence(self, n: float) -> float:
        c, alpha = self.style * min(1, 200 / n), [2 * self.k * p for p in self.ps]
        total = math.lgamma(sum(alpha)) - math.lgamma(sum(c) + sum(alpha))
        for k in range(self.k):
            total += math.lgamma(c[k] + alpha[k]) - math.lgamma(alpha[k]) - c[k] * math.log(self.ps[k])
        return total

    def step(self, x: np.ndarray) -> dict[str, Any]:
        fade = self.memory ** len(x)
        self.n, self.classes, self.style = self.n * fade, self.classes * fade, self.style * fade
        for sums in (self.a1, self.a2, self.b1, self.b2):
            sums.update({layer: value * fade for layer, value in sums.items()})
        lp0, a1, a2 = self.style_pass(x)
        signals: dict[str, Any] = {"restarted": 0.0}
        if len(x) >= 16 and self.n >= 16:
            now, then = np.exp(lp0).mean(0), self.style
            u = 1 - now @ then / math.sqrt((now @ now) * (then @ then))
            gap = self.row_sums(x)[0] / len(x) - self.a1["bn1"] / self.n
            v = float((gap**2 / self.omega["bn1"]).mean()) / (1 / len(x) + 1 / self.n)
            signals |= {"prediction_drift": u, "style_drift": v}
            if self.restart and (u > 0.5 or v > 40):
                self.reset()
                lp0, a1, a2 = self.style_pass(x)
                signals["restarted"] = 1.0
        n, self.style = self.n + len(x), self.style + np.exp(lp0).sum(0)
        ev = self.evidence(n)
        g = 1 / (1 + math.exp(-ev))
        _, r = self.em(lp0)
        share = (self.classes + r.sum(0)) / (self.classes + r.sum(0)).sum()
        b1, b2, strengths = {}, {}, []

        def norm(layer: str, z: np.ndarray) -> np.ndarray:
            a, b = self.row_sums(z)
            b1[layer], b2[layer] = self.b1[layer] + a, self.b2[layer] + b
            d1 = b1[layer] / n - sum(share[k] * self.mu[layer][k] for k in range(self.k))
            d2 = b2[layer] / n - sum(share[k] * self.sq[layer][k] for k in range(self.k))
            eta = float((self.omega[layer] / self.v[layer]).mean())
            lam = float((d1**2 / self.v[layer]).mean())
            strengths.append(min(max(1 - 2 * eta / (n * max(lam, 1e-12)), 0.0), 1.0))
            return self.normalise(layer, z, d1, d2, strengths[-1])

        p, r = self.em(self.forward(x, norm))
        self.n, self.classes = n, self.classes + r.sum(0)
        self.a1, self.a2, self.b1, self.b2 = a1, a2, b1, b2
        signals |= {"evidence": ev, "label_shift": g, "prior": p, "shrink": strengths}
        return {"logits": np.log(g * r + (1 - g) * np.exp(lp0)), "signals": signals}


def log_softmax(z: np.ndarray) -> np.ndarray:
    shifted = z - z.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.fixture
def small_stream(small_rows: Rows) -> list[Tensor]:
    """Batches of all sizes with another style and mix, then a client that differs in both."""
    rows, labels = small_rows(200, seed=1)
    client = torch.cat([rows[labels == 0], rows[labels == 1][:20]]) * 1.4 + 0.3
    client = client[torch.randperm(len(client), generator=torch.Generator().manual_seed(2))]
    other = rows[labels == 2] * 0.5 - 4
    return [client[:1], client[1:2], client[2:9], client[9:29], client[29:49], client[49:80], other[:20], other[20:40]]


@pytest.mark.parametrize("memory", [1.0, 0.97])
@pytest.mark.parametrize("restart", [True, False])
def test_every_step_against_numpy_and_scalar_loops(
    memory: float,
    restart: bool,
    small_model: Models,
    follow: Follow,
    small_stream: list[Tensor],
) -> None:
    model, batches = small_model(), small_stream
    oracle = Oracle(model, memory, restart)
    steps = follow("balanced", model, batches, memory=memory, restart="on" if restart else "off")
    for batch, step in zip(batches, steps, strict=True):
        expected = oracle.step(batch.numpy())
        np.testing.assert_allclose(step.logits.numpy(), expected["logits"], rtol=0, atol=1e-10)
        assert {name: step.signals[name] for name in expected["signals"]} == {
            name: pytest.approx(np.asarray(value).tolist(), abs=1e-10) for name, value in expected["signals"].items()
        }
        tensors = step.state.tensors
        assert float(tensors["rows"]) == pytest.approx(oracle.n, abs=1e-10)
        for name, sums in {"h0.posterior": oracle.style, "h1.posterior": oracle.classes}.items():
            np.testing.assert_allclose(tensors[name].numpy() * oracle.n, sums, rtol=0, atol=1e-10)
        for name, (a, b) in {"h0": (oracle.a1, oracle.a2), "h1": (oracle.b1, oracle.b2)}.items():
            moments = SourceMoments.of(model).moments(tensors[deviations_of(name)])
            sums = np.stack([np.concatenate([s["bn1"], s["bn2"]]) for s in (a, b)])
            np.testing.assert_allclose(moments.numpy() * oracle.n, sums, rtol=0, atol=1e-9)
    assert any(step.signals["restarted"] for step in steps) == restart
    assert any(0 < m < 1 for step in steps for m in step.signals["shrink"])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("counts", "prior", "evidence", "g"),
    [
        ([5, 15], [0.5, 0.5], 1.2991388308, 0.7856900140),
        ([10, 10], [0.5, 0.5], -0.9473567956, 0.2794167023),
        ([3, 1], [0.75, 0.25], -0.3897167511, None),
        ([0, 0, 20], [0.25, 0.25, 0.5], 8.4248643023, None),
        ([0, 0], [0.5, 0.5], 0.0, 0.5),
    ],
)
def test_equation_6_evidence_of_label_shift(counts: list[int], prior: list[float], evidence: float, g: float) -> None:
    rows = float(sum(counts))
    measured = label_shift_evidence(np.array(counts) / max(rows, 1), rows, np.array(prior), 2.0)
    assert measured == pytest.approx(evidence, abs=1e-9)
    if g is not None:
        assert math.exp(log_sigmoid(measured)) == pytest.approx(g, abs=1e-9)


def test_no_more_than_gate_rows_count_as_evidence(logit_model: Models) -> None:
    model = logit_model([0.5, 0.5])
    logits = double(0.75, 0.25).log().expand(400, 2)
    adapter = create("balanced")
    signals = adapter.step(model, adapter.init(model), logits).signals
    assert signals["evidence"] == pytest.approx(23.7114080750, abs=1e-9)  # of 150 and 50 rows


def test_equation_5_each_iteration_of_em() -> None:
    log_p, prior, nothing = np.log([[0.9, 0.1], [0.6, 0.4]]), np.array([0.5, 0.5]), np.zeros(2)
    expected = [0.5227272727, 0.5240689254, 0.5241467880, 0.5241513023, 0.5241515640]
    measured = [float(map_em(log_p, nothing, 0.0, prior, 20.0, steps)[0][0]) for steps in range(1, 6)]
    assert measured == pytest.approx(expected, abs=1e-9)
    earlier = np.array([30.0, 10.0])
    assert float(map_em(log_p, earlier, 40.0, prior, 20.0, 5)[0][0]) == pytest.approx(0.6726407778, abs=1e-9)
    assert float(map_em(log_p[:0], earlier, 40.0, prior, 20.0, 1)[0][0]) == pytest.approx(0.6666666667, abs=1e-9)


@pytest.mark.parametrize(
    ("drift", "other"), [("prediction", {"restart_style": 1e9}), ("style", {"restart_prediction": 1.0})]
)
def test_equation_8_either_drift_beyond_its_threshold_restarts(
    drift: str,
    other: dict[str, float],
    small_rows: Rows,
    small_model: Models,
    follow: Follow,
) -> None:
    model, rows = small_model(), small_rows(32, seed=1)[0]
    batches = [rows[:16], rows[16:] - 1]  # as short as a batch and a history may be
    measured = follow("balanced", model, batches, restart="off")[1].signals[f"{drift}_drift"]
    for factor, restarts in ((0.999, 1.0), (1.001, 0.0)):
        steps = follow("balanced", model, batches, **other, **{f"restart_{drift}": measured * factor})  # type: ignore[operator]
        assert steps[1].signals["restarted"] == restarts
