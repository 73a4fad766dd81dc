"""`balanced`: style and label shift told apart without gradients; this project's own method, not one of a paper."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.adapter import Signal, Step, require
from acclimate_adapters.functional import entropy
from acclimate_adapters.hyperparameters import check, choice, integer, real
from acclimate_adapters.model import FrozenModel
from acclimate_adapters.moments import TINY, Bend, SourceMoments, by_layer, shrink
from acclimate_adapters.priors import log_posteriors
from acclimate_adapters.state import State


class Hypothesis(NamedTuple):
    """What a client's rows looked like under one explanation of them."""

    posterior: Tensor  # [K], mean over the rows
    moments: Tensor  # [2, C], means over the rows of a and b at all layers, channels side by side

    def after(self, log_p: Tensor, moments: Tensor, weight: float) -> "Hypothesis":
        """With a batch folded in: its log-posteriors [B, K], the moments after it, its weight among all rows."""
        return Hypothesis(torch.lerp(self.posterior, log_p.exp().mean(0), weight), moments)


class Client(NamedTuple):
    """What is known of a client."""

    rows: float  # n; fractional once rows are partly forgotten
    h0: Hypothesis
    h1: Hypothesis


class Pass(NamedTuple):
    """What one forward pass yields."""

    logits: Tensor  # [B, K]
    log_p: Tensor  # [B, K], in single precision at least
    features: Tensor  # [B, d]
    bend: Bend


@dataclass(frozen=True, slots=True)
class Balanced:
    """Average a style-only and a style-and-label explanation of how a client's BatchNorm statistics differ.

    This project's own method, not one of a paper. Opt-in: made for corruptions of the source domain. Where the domain
    really changes it can be far worse than no adaptation, tens of points for single clients; see
    docs/explanation-balanced.md before serving it.

    Method (equations numbered here; B rows of this batch, n rows with it; all means are over the client's rows so far):
        a, b     mean and mean square over space of a row at a BatchNorm layer, per channel
        mu_k, s_k their means in class k at the source, omega the variance of a within a class (`Source.moments`)
        M1, M2   their means under the training prior p_s (`Source.prior`); V = M2 - M1^2
        rho      = clip((M2 + d2 - (M1 + d1)^2) / V, 0.05, 20) for deviations d1, d2 of the client's mean a, b    (1)
        bend     mean = running_mean + m d1,  variance = running_var (1 + m (rho - 1))                            (2)
        H0       style only: d1 = mean a - M1, d2 = mean b - M2, m = n / (n + `style_rows`)                       (3)
        H1       style and labels: d1 = mean a - sum_k share_k mu_k, d2 = mean b - sum_k share_k s_k,
                 m = clip(1 - `shrinkage` eta / (n lambda), 0, 1), the James-Stein factor of a layer, with
                 eta = mean of omega / V and lambda = mean of d1^2 / V over its channels                          (4)
        EM       from p = (sum of earlier r + `prior_rows` p_s) / (n - B + `prior_rows`), `em_steps` times
                 r_i = softmax(log p(.|x_i) + log p / p_s), p = (sum of all r + `prior_rows` p_s)
                 / (n + `prior_rows`)                                                                             (5)
        share    mean of all r, after (5) on the posteriors of H0; (5) on those of H1 gives the prior and r_i
        evidence for label shift, H1, in the mean posterior q of H0 (Dirichlet-multinomial against multinomial):
                 ev = ln G(sum alpha) - ln G(N + sum alpha) + sum_k [ln G(c_k + alpha_k) - ln G(alpha_k)]
                 - sum_k c_k ln p_s_k,  c = min(n, `gate_rows`) q,  N = sum c,
                 alpha = `gate_concentration` K p_s,  g = sigmoid(ev)                                             (6)
        logits   = log(g r_i + (1 - g) p_H0(.|x_i))                                                               (7)
        restart  as a new client, if batch and history have `restart_rows` each, and either the mean posteriors of
                 H0 have 1 - cos > `restart_prediction`, or at the first layer the mean of
                 (mean a of the batch - mean a before)^2 / omega exceeds `restart_style` (1/B + 1/(n - B))        (8)
        memory   multiplies n - B by `memory`^B first

    Departures:
        A network without BatchNorm has one pass, whose posteriors serve H0 and H1.
        In (8), channels that do not vary at the source do not count.

    Args:
        memory: weight that a row keeps with each row after it, 0..1; 1 forgets nothing.
        restart: "on" or "off".
        style_rows: rows that the training statistics count for under H0.
        shrinkage: James-Stein factor's numerator; the larger, the less H1 bends.
        prior_rows: rows, spread like the training prior, that the prior starts from.
        em_steps: EM steps.
        gate_concentration: mean concentration of the prior over class mixes under label shift.
        gate_rows: most rows that count as evidence, so that a classifier's slight bias never becomes significant.
        restart_rows, restart_prediction, restart_style: what makes a batch the first of a changed client.

    Reference: docs/explanation-balanced.md. EM: Saerens, Latinne, Decaestecker, Neural Computation 14(1), 2002.
    """

    name: ClassVar[str] = "balanced"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"moments"})

    memory: float = real(1.0, low=0.0, high=1.0, doc="weight that a row keeps with each row after it; 1 never forgets")
    restart: str = choice("on", "off", doc="whether a batch unlike all before makes the client a new one")
    style_rows: float = real(20.0, low=0.0, high=1e9, doc="rows that the training statistics count for")
    shrinkage: float = real(2.0, low=0.0, high=1e9, doc="the larger, the less a deviation that may be noise counts")
    prior_rows: float = real(20.0, low=0.01, high=1e9, doc="rows that the training prior counts for")
    em_steps: int = integer(5, low=1, high=1000, doc="EM steps per estimate of the prior")
    gate_concentration: float = real(2.0, low=0.01, high=1e3, doc="how even a class mix is expected under label shift")
    gate_rows: float = real(200.0, low=1.0, high=1e9, doc="most rows that count as evidence of label shift")
    restart_rows: int = integer(16, low=1, high=1_000_000, doc="least rows, in batch and history, for a restart")
    restart_prediction: float = real(0.5, low=0.0, high=1.0, doc="1 - cosine of mean posteriors that restarts")
    restart_style: float = real(40.0, low=0.0, high=1e9, doc="squared distance, in units of noise, that restarts")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet: zeros.

        Raises:
            MissingSource: the source carries no class moments, or not of every BatchNorm layer.
            ConfigurationError: they are of another width than the layer.
        """
        require(self, model)
        return State(self.name, self.layout, model.content_hash, tensors=pack(fresh(SourceMoments.of(model))))

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        state.require(self.name, self.layout, model.content_hash)
        x = model.batch(x)
        source = SourceMoments.of(model)
        client = unpack(state, source.prior)
        client = client._replace(rows=client.rows * self.memory ** len(x))
        plain = self._style_only(model, source, client, x)
        drift = self._drift(source, client, plain)
        restarted = self._restarts(drift)
        if restarted:
            client = fresh(source)
            plain = self._style_only(model, source, client, x)
        full = self._style_and_labels(model, source, client, x, plain.log_p) if source.widths else plain
        prior, log_r = self._em(source, client, full.log_p)
        rows, weight = client.rows + len(x), len(x) / (client.rows + len(x))
        h0 = client.h0.after(plain.log_p, plain.bend.moments(), weight)
        new = Client(rows, h0, client.h1.after(log_r, full.bend.moments(), weight))
        evidence = label_shift_evidence(h0.posterior, min(rows, self.gate_rows), source.prior, self.gate_concentration)
        logits = torch.logaddexp(log_r + F.logsigmoid(evidence), plain.log_p + F.logsigmoid(-evidence))  # (7)
        signals: dict[str, Signal] = {
            "entropy": float(entropy(logits).mean()),
            "evidence": float(evidence),
            "label_shift": float(evidence.sigmoid()),
            "prior": tuple(prior.tolist()),
            "restarted": float(restarted),
            "shift": float((prior - source.prior).abs().sum() / 2),
            "shrink": tuple(torch.stack(full.bend.strengths).tolist()) if full.bend.strengths else (),
            **drift,
        }
        frozen = None if source.widths else plain.logits
        return Step(logits.to(plain.features.dtype), state.next(pack(new)), signals, frozen, full.features)

    def _style_only(self, model: FrozenModel, source: SourceMoments, client: Client, x: Tensor) -> Pass:
        """The pass of H0 (3)."""
        rows = client.rows + len(x)
        strength = source.prior.new_tensor(rows / (rows + self.style_rows))
        return run(model, x, Bend(source, source.overall, client.h0.moments, len(x) / rows, lambda layer, d1: strength))

    def _style_and_labels(
        self, model: FrozenModel, source: SourceMoments, client: Client, x: Tensor, log_p: Tensor
    ) -> Pass:
        """The pass of H1 (4), with class shares from the posteriors log_p [B, K] of H0."""
        rows, weight = client.rows + len(x), len(x) / (client.rows + len(x))
        _, log_r = self._em(source, client, log_p)
        share = torch.lerp(client.h1.posterior, log_r.exp().mean(0), weight)
        strength = partial(shrink, rows=rows, factor=self.shrinkage)
        return run(model, x, Bend(source, share @ source.by_class, client.h1.moments, weight, strength))

    def _em(self, source: SourceMoments, client: Client, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """The prior [K] and the log-posteriors [B, K] under it (5)."""
        earlier = client.rows * client.h1.posterior
        return map_em(log_p, earlier, client.rows, source.prior, self.prior_rows, self.em_steps)

    def _drift(self, source: SourceMoments, client: Client, plain: Pass) -> dict[str, float]:
        """How unlike the history of the client its batch is (8); nothing when either is too short to tell."""
        rows = len(plain.log_p)
        if min(rows, client.rows) < self.restart_rows:
            return {}
        drift = {"prediction_drift": float(prediction_drift(plain.log_p.exp().mean(0), client.h0.posterior))}
        first = next(iter(plain.bend.batch), None)
        if first is not None:
            batch, before = plain.bend.batch[first], by_layer(client.h0.moments, source.widths)[first]
            distance = style_distance(batch[0], before[0], source.layers[first].row_variance)
            drift["style_drift"] = float(distance) / (1 / rows + 1 / client.rows)
        return drift

    def _restarts(self, drift: Mapping[str, float]) -> bool:
        changed = (
            drift.get("prediction_drift", 0.0) > self.restart_prediction
            or drift.get("style_drift", 0.0) > self.restart_style
        )
        return self.restart == "on" and changed


def run(model: FrozenModel, x: Tensor, bend: Bend) -> Pass:
    """One pass, without gradient; raises NumericalError when a logit is not finite."""
    with torch.no_grad():
        answer = model.run(x, normalise=bend)
    return Pass(answer.logits, log_posteriors(answer.logits), answer.features, bend)


def map_em(
    log_p: Tensor, earlier: Tensor, rows: float, prior: Tensor, pseudo_rows: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Maximum a posteriori estimate of a client's prior by EM (5).

    Args:
        log_p: [B, K], log-posteriors under the training prior.
        earlier: [K], sum of the posteriors of earlier rows.
        rows: how many those were.
        prior: p_s [K], positive, sum 1.
        pseudo_rows: weight of p_s in the estimate, > 0.
        steps: EM steps.

    Returns:
        The prior [K], positive, sum 1, and the log-posteriors [B, K] under it.
    """
    known, total = earlier + pseudo_rows * prior, rows + len(log_p) + pseudo_rows
    likelihood = log_p.exp() / prior  # [B, K], up to a row constant
    p = known / (rows + pseudo_rows)
    for _ in range(steps):
        p = (known + p * (likelihood.T @ (1 / (likelihood @ p)))) / total
    return p, torch.log_softmax(log_p + (p / prior).log(), dim=-1)


def label_shift_evidence(posterior: Tensor, rows: float, prior: Tensor, concentration: float) -> Tensor:
    """Log Bayes factor [] of some class mix against the training prior, in double precision on the CPU (6).

    Args:
        posterior: q [K], mean over a client's rows.
        rows: N, how many of them count, >= 0.
        prior: p_s [K], positive, sum 1.
        concentration: `gate_concentration`.
    """
    prior = prior.cpu().double()
    counts, alpha = rows * posterior.cpu().double(), concentration * len(prior) * prior
    mixes = torch.lgamma(alpha.sum()) - torch.lgamma(counts.sum() + alpha.sum())
    return mixes + (torch.lgamma(counts + alpha) - torch.lgamma(alpha) - counts * prior.log()).sum()


def prediction_drift(batch: Tensor, before: Tensor) -> Tensor:
    """1 - cosine [] of two mean posteriors [K] (8)."""
    return 1 - F.cosine_similarity(batch, before, dim=0)


def style_distance(batch: Tensor, before: Tensor, row_variance: Tensor) -> Tensor:
    """Mean over channels of (batch - before)^2 / omega, all [c]; channels without variance count as 0 (8)."""
    distance = (batch - before).square() / row_variance
    return torch.where(row_variance > TINY, distance, 0.0).mean()


def fresh(source: SourceMoments) -> Client:
    """A client that has sent nothing yet."""
    nothing = Hypothesis(torch.zeros_like(source.prior), torch.zeros_like(source.overall))
    return Client(0.0, nothing, nothing)


def pack(client: Client) -> dict[str, Tensor]:
    """The tensors of a state."""
    tensors = {"rows": torch.tensor(client.rows, dtype=torch.float64)}
    for name, hypothesis in {"h0": client.h0, "h1": client.h1}.items():
        tensors |= {f"{name}.{field}": tensor for field, tensor in hypothesis._asdict().items()}
    return tensors


def unpack(state: State, like: Tensor) -> Client:
    """The inverse of `pack`, on the device and in the precision of another tensor."""
    h0, h1 = (
        Hypothesis(*(state.tensors[f"{name}.{field}"].to(like) for field in Hypothesis._fields))
        for name in ("h0", "h1")
    )
    return Client(float(state.tensors["rows"]), h0, h1)
