"""The one table of limits names every bound that an operator can set, with its default."""

import re
from pathlib import Path

import pytest

from acclimate_service.http.problems import STATUS
from acclimate_service.settings import Settings, variable

DOCUMENT = (Path(__file__).parents[2] / "docs" / "reference-http.md").read_text()
TABLE = DOCUMENT.partition("\n## Limits\n")[2].partition("\n## ")[0]
BOUNDS = [name for name in Settings.model_fields if name.startswith("max_")]
UNITS = {"MiB": 2**20, "GiB": 2**30, "s": 1000, "": 1}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_that_can_be_set_is_in_the_table_with_its_default(name):
    found = re.search(rf"`{variable(name)}`, ([0-9,]+(?: x [0-9]+)?) ?(MiB|GiB|s|)\b", TABLE)
    assert found, variable(name)
    number = 1
    for factor in found[1].replace(",", "").split(" x "):
        number *= int(factor)
    assert number * UNITS[found[2]] == Settings.model_fields[name].default


def test_every_code_in_the_table_is_one():
    assert set(re.findall(r"\b[45]\d\d `([a-z_]+)`", TABLE)) <= STATUS.keys()
