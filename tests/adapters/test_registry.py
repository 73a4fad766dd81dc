import dataclasses
import math

import jsonschema
import pytest

from acclimate_adapters import ADAPTERS, ConfigurationError, UnknownAdapter, create, enrols, schema


def test_unknown_adapter_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownAdapter, match="atp"):
        create("apt")


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_every_adapter_is_a_frozen_record_that_explains_itself(name: str) -> None:
    kind = ADAPTERS[name]
    assert kind.name == name
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    doc = kind.__doc__ or ""
    sections = [doc.find(title) for title in ("Method", "Departures")]
    assert -1 not in sections
    assert sections == sorted(sections)
    assert not dataclasses.fields(kind) or "Args:" in doc


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_schema_accepts_the_defaults_and_nothing_out_of_range(name: str) -> None:
    rules = schema(name)
    jsonschema.Draft202012Validator.check_schema(rules)
    defaults = {key: rule["default"] for key, rule in rules["properties"].items()}
    jsonschema.validate(defaults, rules)
    assert create(name, **defaults) == create(name)
    for key, rule in rules["properties"].items():
        wrong = {"number": "much", "integer": 1.5, "string": "neither", "array": [1], "boolean": "maybe"}[rule["type"]]
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({key: wrong}, rules)
        with pytest.raises(ConfigurationError, match=key):
            create(name, **{key: wrong})
        if "maximum" in rule:
            with pytest.raises(ConfigurationError, match=key):
                create(name, **{key: rule["maximum"] + 1})


@pytest.mark.parametrize("name", sorted(ADAPTERS))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400], ids=["nan", "inf", "-inf", "10^400"])
def test_non_finite_rate_tau_lambda_or_eta_is_refused(name: str, value: float) -> None:
    for f in dataclasses.fields(ADAPTERS[name]):
        if f.metadata["type"] in ("number", "integer"):
            with pytest.raises(ConfigurationError, match=f.name):
                create(name, **{f.name: value})


@pytest.mark.parametrize("name", ["name", "layout", "needs", "self"])
def test_what_is_no_hyper_parameter_cannot_be_set_like_one(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"no hyper-parameter {name}; it has steps"):
        create("em", **{name: 1})


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fedthe", True), ("fedthe_plus", True), ("fedthe+em", True), ("atp", False), ("atp+em", False), ("none", False)],
)
def test_adapters_say_whether_they_take_labelled_examples(name: str, expected: bool) -> None:
    assert enrols(create(name)) is expected
