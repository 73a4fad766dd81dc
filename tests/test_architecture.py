"""The page on the architecture says what is there: its stops are functions, its links lead somewhere."""

import importlib
import re
from functools import reduce
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md")) + sorted(ROOT.glob("*.md"))
STOP = re.compile(r"^\| (\d+) \| \[`([\w.]+)`\]\(\.\./\w+/([\w/]+)\.py\)", re.MULTILINE)


def test_every_stop_of_a_batch_is_a_function_of_the_file_it_names() -> None:
    stops = STOP.findall((ROOT / "docs/architecture.md").read_text())
    assert [int(number) for number, _, _ in stops] == list(range(1, len(stops) + 1))
    assert 5 < len(stops) <= 10
    for _, name, file in stops:
        found = reduce(getattr, name.split("."), importlib.import_module(file.replace("/", ".")))
        assert callable(found)


def test_every_relative_link_of_the_documents_leads_to_a_file() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert broken == []
