"""What the operators' handbook names exists."""

import re
from pathlib import Path

import pytest

from acclimate_service.metrics import Metrics
from acclimate_service.settings import Settings
from acclimate_service.state import Limits

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def handbook() -> str:
    return (DEPLOY / "README.md").read_text()


def test_every_setting_it_names_exists(handbook):
    names = {name.lower() for name in re.findall(r"ACCLIMATE_([A-Z_]+)", handbook)}
    assert names <= Settings.model_fields.keys()


def test_every_metric_it_names_exists(handbook):
    names = set(re.findall(r"\bacclimate_(?!service\b|backend\b)[a-z_]+", handbook))
    assert {name.removesuffix("_total") for name in names} <= {one.name for one in Metrics().registry.collect()}


def test_every_file_it_names_exists(handbook):
    names = set(re.findall(r"[\w/.-]+\.(?:ya?ml|conf|py)\b|kubernetes/base|overlays/redis", handbook)) - {"pip.conf"}
    folders = DEPLOY, DEPLOY.parent, DEPLOY / "kubernetes", DEPLOY / "kubernetes/base", DEPLOY / "monitoring"
    assert [name for name in names if not any((folder / name).exists() for folder in folders)] == []


def test_every_problem_it_names_is_in_the_reference(handbook):
    reference = (DEPLOY.parent / "docs/reference-http.md").read_text()
    assert {code for code in re.findall(r"\b\d{3} `(\w+)`", handbook) if f"`{code}`" not in reference} == set()


def test_the_bounds_of_its_sizes_are_those_of_the_service(handbook):
    limits, settings = Limits(), Settings()
    assert f"`ACCLIMATE_INLINE_MAX` ({settings.inline_max // 2**10} KiB)" in handbook
    assert f"until {limits.snapshot_entries} entries" in handbook
    assert f"{limits.journal_entries} entries or {limits.journal_bytes // 2**20} MiB" in handbook
    assert f"{limits.key_cap:,} markers, {limits.answer_bytes // 2**20} MiB" in handbook
    assert f"`ACCLIMATE_CACHE_BYTES` ({settings.cache_bytes // 2**20} MiB)" in handbook
