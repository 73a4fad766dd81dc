"""`balanced`: style and label shift told apart without gradients; this project's own method, not one of a paper."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from acclimate_adapters.adapter import Signal, Step, require, require_state
from acclimate_adapters.balanced.client import HYPOTHESES, Client, deviations_of
from acclimate_adapters.balanced.measures import (
    label_shift_evidence,
    log_sigmoid,
    map_em,
    prediction_drift,
    style_distance,
)
from acclimate_adapters.balanced.moments import SourceMoments
from acclimate_adapters.balanced.passes import Answer, Passes, Rows, Run, Terms, TorchPasses
from acclimate_adapters.cost import Cost, forward_pass, posterior_sweep
from acclimate_adapters.functional import Numbers, class_labels, numbers
from acclimate_adapters.hyperparameters import check, choice, integer, real
from acclimate_adapters.labels import Labelled
from acclimate_adapters.network.model import FrozenModel
from acclimate_adapters.state import Form, State


class Turn(NamedTuple):
    """A client as it was before its batch, and the batch."""

    client: Client
    x: Tensor  # [B, C, H, W]

    @property
    def rows(self) -> float:
        """n with the batch."""
        return self.client.rows + len(self.x)

    @property
    def weight(self) -> float:
        """Weight of the batch among all rows, in 0..1."""
        return len(self.x) / self.rows


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
        labels   that `learn` is told, n_k of class k, count as `label_weight` rows each (see `labels`): (5) adds
                 `label_weight` n_k to the sums of r, and their number to n. They fade by `memory` like rows, and go
                 with a restart

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
        label_weight: rows that a true label counts for; 0 learns nothing from labels.

    Reference: docs/explanation-balanced.md. EM: Saerens, Latinne, Decaestecker, Neural Computation 14(1), 2002.
    """

    name: ClassVar[str] = "balanced"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"moments", "prior"})
    uncorrectable: ClassVar[str] = "corrected for the client's class prior already"

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
    label_weight: float = real(0.0, low=0.0, high=1e3, doc="rows that a true label counts for; 0 ignores labels")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    @property
    def learns(self) -> bool:
        """Whether true labels count."""
        return self.label_weight > 0

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet: zeros.

        Raises:
            MissingSource: the source carries no class moments, or not of every BatchNorm layer.
            ConfigurationError: they are of another width than the layer.
        """
        require(self, model)
        source = SourceMoments.of(model)
        fresh = Client.fresh(source, learns=self.learns)
        return State(self.name, self.layout, model.content_hash, tensors=fresh.pack(source))

    def learn(self, model: FrozenModel, state: State, rows: Labelled) -> State:
        """The state with more true labels, as `Learning.learn`; images are not looked at."""
        require_state(self, model, state)
        labels = class_labels(rows.labels, len(rows.labels), model.classes)
        before = state.tensors["labelled"]
        counts = torch.bincount(labels, minlength=model.classes).to(before)
        return replace(state, tensors={**state.tensors, "labelled": before + counts})

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """How many rows came, and their means under both hypotheses, as `Adapter.form`."""
        return Client.forms(model.derived(SourceMoments.of), state.tensors, learns=self.learns)

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """A pass under each hypothesis and one more after a restart, each but that with EM, as `Costly.cost`."""
        return forward_pass(rows).times(3).and_also(posterior_sweep(rows).times(2 * self.em_steps))

    def sensitivity(self, model: FrozenModel) -> dict[str, float]:
        """Three digits of every deviation, as `Tolerant.sensitivity`: with two, one answer in a hundred is another."""
        return dict.fromkeys(map(deviations_of, HYPOTHESES), math.inf)

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        return self.step_many(model, [state], [x])[0]

    def bounded(self, model: FrozenModel, before: State, after: State, rows: int, influence: float) -> State:
        """The means with the batch at the weight of at most `influence` mean batches, as `Bounding.bounded`.

        A restart, which forgets what came before, is bounded like any batch.
        """
        known, now = float(before.tensors["rows"]), float(after.tensors["rows"])
        most = influence * known / before.step
        if rows <= most:
            return after
        kept, source = known * self.memory**most, model.derived(SourceMoments.of)
        earlier = Client.unpack(before, source).pack(source)  # as it is written now
        share = most / (kept + most) / (rows / now)  # of the change that the whole batch made
        tensors = {
            name: torch.lerp(earlier[name].to(tensor), tensor, share)
            for name, tensor in after.tensors.items()
            if name != "rows"
        }
        return replace(after, tensors={**tensors, "rows": after.tensors["rows"].new_tensor(kept + most)})

    @np.errstate(all="ignore")  # what overflows ends as NaN in the answer or the state, which the guard refuses
    def step_many(
        self,
        model: FrozenModel,
        states: Sequence[State],
        batches: Sequence[Tensor],
        passes: Passes | None = None,
        run: Run | None = None,
    ) -> list[Step]:
        """The steps of several clients, whose rows go through the network together; up to rounding, those of `step`.

        Args:
            model: the frozen model.
            states: one for each client, no client twice.
            batches: of each client, [B, C, H, W] of the same C, H and W.
            passes: what runs the network; torch by default.
            run: its passes over these rows, where others take some of them, too.

        Raises:
            InputError, StateMismatch: as `Adapter.step`, for any of the clients.
            NumericalError: somebody's answer is not finite; to learn whose, take the steps one by one.
        """
        source = model.derived(SourceMoments.of)
        turns = [self._turn(model, source, state, x) for state, x in zip(states, batches, strict=True)]
        passes = passes or TorchPasses(model, source)
        run = run or passes(Rows.of([turn.x for turn in turns], source.prior))
        plain = self._style_only(run, source, turns)
        drifts = [self._drift(source, turn, answer) for turn, answer in zip(turns, plain, strict=True)]
        self._restart(passes, source, turns, plain, drifts)
        full = self._style_and_labels(run, source, turns, plain) if source.widths else plain
        return [
            self._finish(source, states[i], turns[i], plain=plain[i], full=full[i], drift=drifts[i])
            for i in range(len(turns))
        ]

    def _turn(self, model: FrozenModel, source: SourceMoments, state: State, x: Tensor) -> Turn:
        require_state(self, model, state)
        client, x = Client.unpack(state, source), model.batch(x)
        kept = self.memory ** len(x)
        labelled = None if client.labelled is None else client.labelled * kept
        return Turn(client._replace(rows=client.rows * kept, labelled=labelled), x)

    def _style_only(self, run: Run, source: SourceMoments, turns: Sequence[Turn]) -> list[Answer]:
        """The pass of H0 (3)."""
        strengths = [turn.rows / (turn.rows + self.style_rows) for turn in turns]
        terms = Terms(
            expected=source.overall.unsqueeze(1).expand(-1, len(turns), -1),
            before=torch.stack([turn.client.h0.moments for turn in turns], dim=1),
            weight=source.prior.new_tensor([turn.weight for turn in turns]),
            most=source.prior.new_tensor(strengths),
            noise=None,
        )
        return run(terms).split(turn.x for turn in turns)

    def _style_and_labels(
        self, run: Run, source: SourceMoments, turns: Sequence[Turn], plain: Sequence[Answer]
    ) -> list[Answer]:
        """The pass of H1 (4), with class shares from the posteriors of H0."""
        shares = []
        for turn, answer in zip(turns, plain, strict=True):
            _, log_r = self._em(source, turn, answer)
            shares.append(turn.client.h1.posterior_after(log_r, turn.weight))
        terms = Terms(
            expected=source.prior.new_tensor(np.stack(shares)) @ source.by_class,
            before=torch.stack([turn.client.h1.moments for turn in turns], dim=1),
            weight=source.prior.new_tensor([turn.weight for turn in turns]),
            most=source.prior.new_ones(len(turns)),
            noise=source.prior.new_tensor([self.shrinkage / turn.rows for turn in turns]),
        )
        return run(terms).split(turn.x for turn in turns)

    def _em(self, source: SourceMoments, turn: Turn, answer: Answer) -> tuple[Numbers, Numbers]:
        """The prior [K] and the log-posteriors [B, K] under it (5)."""
        client = turn.client
        earlier, rows = client.rows * client.h1.posterior, client.rows
        if client.labelled is not None:
            known = self.label_weight * client.labelled
            earlier, rows = earlier + known, rows + float(known.sum())
        return map_em(answer.log_p, earlier, rows, source.shares, self.prior_rows, self.em_steps)

    def _drift(self, source: SourceMoments, turn: Turn, plain: Answer) -> dict[str, float]:
        """How unlike the history of the client its batch is (8); nothing when either is too short to tell."""
        client, rows = turn.client, len(turn.x)
        if min(rows, client.rows) < self.restart_rows:
            return {}
        drift = {"prediction_drift": prediction_drift(np.exp(plain.log_p).mean(axis=0), client.h0.posterior)}
        if plain.layers:
            columns = source.columns(plain.layers[0])
            first, before, row_variance = map(
                numbers, (plain.first, client.h0.moments[0, columns], source.row_variance[columns])
            )
            drift["style_drift"] = style_distance(first, before, row_variance) / (1 / rows + 1 / client.rows)
        return drift

    def _restarts(self, drift: Mapping[str, float]) -> bool:
        changed = (
            drift.get("prediction_drift", 0.0) > self.restart_prediction
            or drift.get("style_drift", 0.0) > self.restart_style
        )
        return self.restart == "on" and changed

    def _restart(
        self,
        passes: Passes,
        source: SourceMoments,
        turns: list[Turn],
        plain: list[Answer],
        drifts: Iterable[Mapping[str, float]],
    ) -> None:
        """Put fresh clients in the place of those that changed, and their pass of H0 in the place of that so far."""
        changed = [i for i, drift in enumerate(drifts) if self._restarts(drift)]
        if not changed:
            return
        restarted = [turns[i]._replace(client=Client.fresh(source, learns=self.learns)) for i in changed]
        run = passes(Rows.of([turn.x for turn in restarted], source.prior))
        answers = self._style_only(run, source, restarted)
        for i, turn, answer in zip(changed, restarted, answers, strict=True):
            turns[i], plain[i] = turn, answer

    def _finish(
        self,
        source: SourceMoments,
        state: State,
        turn: Turn,
        *,
        plain: Answer,
        full: Answer,
        drift: Mapping[str, float],
    ) -> Step:
        """The averaged answer (6) and (7), and the state with the batch folded in."""
        prior, log_r = self._em(source, turn, full)
        h0 = turn.client.h0.after(plain.log_p, plain.moments, turn.weight)
        new = Client(turn.rows, h0, turn.client.h1.after(log_r, full.moments, turn.weight), turn.client.labelled)
        counting = min(turn.rows, self.gate_rows)
        evidence = label_shift_evidence(h0.posterior, counting, source.shares, self.gate_concentration)
        logits, uncorrected = (
            np.logaddexp(log_p + log_sigmoid(evidence), plain.log_p + log_sigmoid(-evidence))
            for log_p in (log_r, full.log_p)
        )
        signals: dict[str, Signal] = {
            "entropy": -float((np.exp(logits) * logits).sum(axis=-1).mean()),
            "evidence": evidence,
            "label_shift": math.exp(log_sigmoid(evidence)),
            "prior": tuple(prior.tolist()),
            "restarted": float(self._restarts(drift)),
            "shift": float(np.abs(prior - source.shares).sum() / 2),
            "shrink": tuple(full.strengths.tolist()),
            **drift,
        }
        frozen = None if source.widths else plain.logits
        features = full.features
        answer, before_prior = (torch.from_numpy(each).to(features) for each in (logits, uncorrected))
        return Step(answer, state.next(new.pack(source)), signals, frozen, features, before_prior)
