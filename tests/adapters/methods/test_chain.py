"""Chains against their parts taken one after the other."""

from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

from acclimate_adapters import (
    ADAPTERS,
    Adapter,
    ConfigurationError,
    FrozenModel,
    State,
    StateMismatch,
    UnknownAdapter,
    create,
    schema,
)
from acclimate_adapters.methods.atp import Atp
from acclimate_adapters.methods.chain import Chain, chain
from acclimate_adapters.methods.em import Em

PRIORS = ("bbse", "em", "fedcal")
WINDOW = {"fedcal": {"window": 50}}


def split(state: State, part: str) -> dict[str, Tensor]:
    prefix = f"{part}."
    return {name.removeprefix(prefix): t for name, t in state.tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize("prior", PRIORS)
def test_chain_answers_as_its_parts_one_after_the_other(model: FrozenModel, streams: Tensor, prior: str) -> None:
    both, first, last = create(f"atp+{prior}"), create("atp"), create(prior)
    state, s1, s2 = both.init(model), first.init(model), last.init(model)
    for batch in streams[0, :4]:
        step, adapted = both.step(model, state, batch), first.step(model, s1, batch)
        assert adapted.features is not None
        corrected = last.correct(model, s2, adapted.logits, adapted.features)
        state, s1, s2 = step.state, adapted.state, corrected.state
        assert torch.equal(step.logits, corrected.logits)
        for part, alone in (("atp", s1), (prior, s2)):
            mine = split(state, part)
            assert mine.keys() == alone.tensors.keys()
            assert all(torch.equal(mine[name], alone.tensors[name]) for name in mine)


def test_chain_steps_the_counts_of_both_parts(model: FrozenModel, streams: Tensor) -> None:
    both, first, last = create("atp+em"), create("atp"), create("em")
    state, s1, s2 = both.init(model), first.init(model), last.init(model)
    for k, batch in enumerate(streams[0, :3]):
        state = both.step(model, state, batch).state
        s1, s2 = (a.step(model, s, batch).state for a, s in ((first, s1), (last, s2)))
        assert state.step == s1.step == s2.step == k + 1


def test_frozen_logits_and_features_are_those_of_the_weights(model: FrozenModel, streams: Tensor) -> None:
    step, alone = (a.step(model, a.init(model), streams[0, 0]) for a in (create("atp+fedcal"), create("atp")))
    for name in ("frozen_logits", "features"):
        assert torch.equal(getattr(step, name), getattr(alone, name))


def test_signals_are_those_of_both_parts_and_the_entropy_that_of_the_answer(
    model: FrozenModel, streams: Tensor
) -> None:
    adapter = create("atp+fedcal")
    step = adapter.step(model, adapter.init(model), streams[0, 0])
    assert {"frozen_entropy", "clamped_variances", "prior", "rows"} <= step.signals.keys()
    log_p = step.logits.log_softmax(-1)
    assert step.signals["entropy"] == pytest.approx(float(-(log_p.exp() * log_p).sum(-1).mean()), abs=1e-6)


def test_state_is_one_record_under_the_name_of_the_chain(model: FrozenModel) -> None:
    state = create("atp+fedcal", **WINDOW).init(model)
    assert state.adapter == "atp+fedcal"
    assert state.tensors["fedcal.log_posteriors"].shape == (50, 10)
    assert "atp.linear5.weight" in state.tensors
    assert State.from_bytes(state.to_bytes()).to_bytes() == state.to_bytes()


@pytest.mark.parametrize("part", [Atp, Em])
def test_layout_changes_with_the_layout_of_either_part(part: type[Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    before = create("atp+em").layout
    monkeypatch.setattr(part, "layout", part.layout + 1)
    assert create("atp+em").layout != before


def test_chain_needs_what_its_parts_need() -> None:
    assert create("atp+bbse").needs == {"gradients", "rates", "confusion", "prior"}
    by_features = {"gradients", "rates", "classifier", "prototypes", "prior"}
    assert create("atp+fedcal", fedcal={"estimator": "fm"}).needs == by_features


def test_hyperparameters_reach_their_part() -> None:
    made = create("atp+fedcal", atp={"mode": "batch"}, fedcal={"window": 50})
    assert made == Chain(create("atp", mode="batch"), create("fedcal", window=50))
    assert made == create("atp+fedcal", fedcal={"window": 50}, atp={"mode": "batch"})
    assert made != create("atp+fedcal")


@pytest.mark.parametrize("other", ["atp", "fedcal", "atp+em", "dynfed+fedcal"])
def test_state_of_another_chain_or_of_a_part_is_refused(model: FrozenModel, streams: Tensor, other: str) -> None:
    with pytest.raises(StateMismatch):
        create("atp+fedcal").step(model, create(other).init(model), streams[0, 0])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("em+atp", r"write 'atp\+em'"),
        ("fedcal+em", "fedcal and em would correct the same class prior twice"),
        ("atp+fedcal+em", "fedcal and em would correct the same class prior twice"),
        (
            "balanced+em",
            "no class prior can be corrected beside 'balanced', whose answers are corrected",
        ),
        ("t3a+em", "no class prior can be corrected beside 't3a', whose answers are similarities to templates"),
        ("t3a+fedcal", "no class prior can be corrected beside 't3a'"),
        ("em+balanced", "no class prior can be corrected beside 'balanced'"),
        ("balanced+fedcal", "no class prior can be corrected beside 'balanced'"),
        ("fed_ade+bbse", "no class prior can be corrected beside 'fed_ade'"),
        ("balanced+fed_ade", "balanced and fed_ade each start from the global weights"),
        ("atp+bn_adapt", "atp and bn_adapt each start from the global weights"),
        ("atp+bn_adapt+em", "atp and bn_adapt each start from the global weights"),
        ("none+em", "'none' changes nothing"),
        ("atp+none", "'none' changes nothing"),
        ("atp+atp", "an adapter can act once only"),
        ("em+em", "an adapter can act once only"),
    ],
)
def test_order_that_makes_no_sense_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        create(name)


def test_chain_of_one_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        chain([create("em")])


@pytest.mark.parametrize("name", ["atp+", "+em", "atp+nonsense", "atp++em", "+"])
def test_unknown_part_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(UnknownAdapter, match="there are atp"):
        create(name)


@pytest.mark.parametrize(
    ("hyperparameters", "reason"),
    [
        ({"mode": "online"}, "as a mapping under its name, one of atp, em; not mode='online'"),
        ({"bbse": {}}, "not bbse={}"),
        ({"atp": "online"}, "not atp='online'"),
        ({"em": {"stepz": 3}}, "adapter 'em' has no hyper-parameter stepz"),
        ({"em": {"steps": 0}}, "steps=0: use an integer from 1 to 1000"),
    ],
)
def test_wrong_hyperparameters_are_refused_with_what_is_accepted(
    hyperparameters: Mapping[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        create("atp+em", **hyperparameters)


def test_enrolment_reaches_the_weights(model: FrozenModel, streams: Tensor) -> None:
    images, labels = streams[0, :2].flatten(0, 1), torch.arange(40) % 10
    state = create("fedthe+em").init(model, x=images, labels=labels)
    alone = create("fedthe").init(model, x=images, labels=labels)
    assert split(state, "fedthe").keys() == alone.tensors.keys() != set()


def test_state_never_grows(model: FrozenModel, streams: Tensor) -> None:
    adapter = create("atp+fedcal", **WINDOW)
    state = adapter.init(model)
    size = state.nbytes
    for batch in streams[0]:
        state = adapter.step(model, state, batch).state
        assert state.nbytes == size


@pytest.mark.parametrize("name", [*sorted(ADAPTERS), "atp+fedcal", "bn_adapt+em"])
def test_schema_is_valid_and_describes_what_create_takes(name: str) -> None:
    described = schema(name)
    jsonschema.Draft202012Validator.check_schema(described)
    jsonschema.validate({}, described)
    create(name)


def test_schema_of_a_chain_holds_the_schemas_of_its_parts() -> None:
    described = schema("atp+fedcal")
    assert described["properties"] == {"atp": schema("atp"), "fedcal": schema("fedcal")}
    jsonschema.validate({"atp": {"mode": "batch"}, "fedcal": {"window": 50}}, described)
    for wrong in ({"em": {}}, {"fedcal": {"window": 0}}, {"mode": "batch"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, described)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in sorted(ADAPTERS)
        if name not in {"none", "balanced", "consensus", "fed_ade", "portfolio", "t3a", *PRIORS}
    ],
)
def test_every_weight_adapter_without_a_prior_of_its_own_can_be_followed_by_a_prior_correction(
    model: FrozenModel, streams: Tensor, name: str
) -> None:
    adapter = create(f"{name}+em")
    step = adapter.step(model, adapter.init(model), streams[0, 0, :4])
    assert bool(step.logits.isfinite().all())
