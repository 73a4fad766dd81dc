import dataclasses

import jsonschema
import pytest

from acclimate_adapters import ADAPTERS, ConfigurationError, UnknownAdapter, create
from acclimate_adapters.hyperparameters import schema


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
    rules = schema(ADAPTERS[name])
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
