"""A configuration has one text, so that what is counted by configuration is counted in one place."""

import pytest

from acclimate_adapters import ConfigurationError, create
from acclimate_service.compute.adapters import Configurations, canonical

EQUAL = [
    ("atp", [{}, {"mode": "online"}]),
    ("atp", [{"mode": "batch"}]),
    ("tent", [{"lr": 1}, {"lr": 1.0, "layers": []}, {"layers": (), "lr": 1}]),
    ("surgical", [{"modules": ["fc"]}, {"modules": ("fc",), "lr": 0.01}]),
    ("atp+fedcal", [{}, {"atp": {}}, {"fedcal": {"estimator": "pl"}, "atp": {"mode": "online"}}]),
    ("atp+fedcal", [{"fedcal": {"estimator": "em"}}, {"fedcal": {"estimator": "em"}, "atp": {}}]),
]


@pytest.mark.parametrize(("name", "choices"), EQUAL)
def test_equal_adapters_have_one_text_and_it_makes_an_equal_adapter(name, choices):
    (text,) = {canonical(name, each) for each in choices}
    for each in choices:
        assert Configurations("none", {}).adapter(text) == create(name, **each)


def test_different_adapters_have_different_texts():
    assert len({canonical(name, choices[0]) for name, choices in EQUAL}) == len(EQUAL)


@pytest.mark.parametrize(
    ("name", "wrong"), [("nope", {}), ("em", {"speed": 3}), ("surgical", {"modules": ["fc"] * 7000}), ("atp+nope", {})]
)
def test_what_no_adapter_takes_has_no_text(name, wrong):
    with pytest.raises(ConfigurationError):
        canonical(name, wrong)
