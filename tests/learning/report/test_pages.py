"""Reports of both commands: one file, nothing from elsewhere, and the numbers that the commands found."""

import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from acclimate_learning.clients import Pool
from acclimate_learning.report.page import STYLE
from acclimate_service.cli import main
from acclimate_service.ui import FILES
from acclimate_store import Catalogue

pytestmark = pytest.mark.integration

SHIPPED = Path(__file__).parents[3] / "model_store/bundles/fashion-cnn"
HOSTILE = (
    '<script>alert("1")</script>',
    "\"><img src='//evil.example/x.png' onerror=alert(1)>",
    "&lt;b&gt; </style>",
    "camera-4",
    "camera-5",
)
ADAPTERS = "bn_adapt,em,tent"


class Reader(HTMLParser):
    """What a browser finds: elements with their attributes, and the rows of all tables by their captions."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.words = ""
        self._text = ""
        self._rows: list[list[str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "tr":
            self._rows.append([])
        self._text = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "caption":
            self._rows = self.tables[self._text] = []
        if tag in ("th", "td"):
            self._rows[-1].append(self._text)

    def handle_data(self, data: str) -> None:
        self._text += data
        self.words += data


class Evaluated(NamedTuple):
    """A report, its JSON, and what it was made of."""

    text: str
    figures: dict[str, Any]
    store: Path
    data: Path


@pytest.fixture(scope="module")
def evaluated(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """Of few images of clients, and a file, whose names would be more than text if they were not escaped."""
    folder = tmp_path_factory.mktemp("evaluated")
    store, data, report, figures = (folder / name for name in ("store", "<img src=x>.npz", "report.html", "all.json"))
    shutil.copytree(SHIPPED, store / "fashion-cnn")
    rows = [row for start in range(0, 1000, 200) for row in range(start, start + 40)]
    np.savez(data, images=pool.images[rows], labels=pool.labels[rows], owners=np.repeat(HOSTILE, 40))
    words = ["evaluate", "fashion-cnn/1", "--clients", str(data), "--by", "owners", "--adapters", ADAPTERS]
    words += ["--store", str(store), "--asked", "0", "0.05", "--write"]
    assert main([*words, "--report", str(report), "--json", str(figures)]) == 0
    return Evaluated(report.read_text(), json.loads(figures.read_text()), store, data)


def holds_nothing_from_elsewhere(text: str) -> None:
    page = Reader(text)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image", "use", "a"}
    for _, attributes in page.elements:
        assert not any(name.startswith("on") or name in ("src", "href", "xlink:href", "style") for name in attributes)
    assert "url(" not in STYLE
    assert "@import" not in STYLE
    policy = next(attributes for _, attributes in page.elements if "http-equiv" in attributes)
    assert policy["content"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert sum(tag == "style" for tag, _ in page.elements) == 1
    assert page.elements.count(("html", {"lang": "en"})) == 1


def test_the_report_of_an_evaluation_is_one_file_with_the_numbers_of_the_json(evaluated: Evaluated) -> None:
    text, figures, store, data = evaluated
    holds_nothing_from_elsewhere(text)
    page = Reader(text)
    heading, *rows = page.tables["Accuracy, gain and harm by adapter"]
    shown = {row[0]: dict(zip(heading, row, strict=True)) for row in rows}
    for told in figures["adapters"]:
        row = shown[told["adapter"]]
        assert row["Accuracy"] == f"{100 * np.mean(told['accuracy']):.2f} %"
        assert row["Gain"] == f"{100 * told['gain']:+.1f}"
        assert row["95 % interval"] == f"{100 * told['low']:+.1f} to {100 * told['high']:+.1f}"
        assert row["Worst client"] == f"{100 * told['worst']:+.1f}"
        assert row["Harmed"] == f"{100 * told['harmed']:.0f} %"
        assert (row["Why not"] == "-") == (told["low"] > 0 and told["harmed"] <= 0.05)
    by_client = page.tables["Gain of each client in points"]
    column = by_client[0].index("em")
    gains = np.subtract(
        *(next(e for e in figures["adapters"] if e["adapter"] == "em")[k] for k in ("accuracy", "frozen"))
    )
    assert [row[column] for row in by_client[1:]] == [f"{100 * gain:+.1f}" for gain in gains]
    assert [row[0] for row in by_client[1:]] == [client["name"] for client in figures["clients"]]
    with_labels = page.tables["Accuracy and harm by adapter and budget of labels"]
    assert with_labels[1:] == [
        [
            each["adapter"], f"{100 * each['share']:.1f} %", f"{100 * each['spent']:.1f} %",
            f"{100 * np.mean(each['accuracy']):.2f} %", f"{100 * each['gain']:+.1f}", f"{100 * each['worst']:+.1f}",
            f"{100 * each['harmed']:.1f} %",
        ]
        for each in figures["asked"]
    ]  # fmt: skip
    assert f"{100 * np.mean(figures['oracle']['accuracy']):.2f} % right" in page.words
    cost = page.tables["Time of a step and size of a state by adapter"]
    assert [row[0] for row in cost[1:]][-1] == "portfolio"
    assert f"acclimate evaluate fashion-cnn/1 --clients '{data}' --by owners --adapters {ADAPTERS}" in page.words
    assert f"{Catalogue(store).load('fashion-cnn', '1').model.content_hash[:16]}" in page.words
    assert "fashion-cnn/2: published, default adapter: " in page.words
    assert f"Recommended: {'none' if all(r['Why not'] != '-' for r in shown.values()) else ''}" in page.words


def test_every_picture_says_what_it_shows_and_stands_beside_a_table(evaluated: Evaluated) -> None:
    page = Reader(evaluated.text)
    pictures = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(pictures) == 5
    assert all(each["role"] == "img" and len(each["aria-label"]) > 20 for each in pictures)
    sections = [tag for tag, _ in page.elements if tag in ("section", "svg", "table")]
    for place, tag in enumerate(sections):
        if tag == "svg":
            assert sections[place - 1 : place + 2] == ["section", "svg", "table"]


def test_names_are_text_whatever_they_hold(evaluated: Evaluated) -> None:
    page = Reader(evaluated.text)
    assert sorted(row[0] for row in page.tables["Gain of each client in points"][1:]) == sorted(HOSTILE)
    assert f"5 clients of {evaluated.data.name}" in page.words


def test_the_report_of_learning_has_rates_rounds_and_evidence(
    store: Path, data: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acclimate_learning.budgets.FEWEST_ROWS", 40)  # as many as the tuning clients have
    report = tmp_path / "learned.html"
    words = ["learn", "fashion-cnn/1", "--data", str(data()), "--teachers", "3", "--judges", "5", "--no-onnx", "--lr"]
    words += ["0.01", "--teacher-images", "20", "--judge-images", "20", "--rounds", "2", "--tune", "surgical"]
    assert main([*words, "--report", str(report)]) == 0
    holds_nothing_from_elsewhere(report.read_text())
    page, (before, after) = Reader(report.read_text()), (Catalogue(store).load("fashion-cnn", v) for v in ("1", "2"))
    rates = after.model.source.rates
    assert rates is not None
    assert page.tables["Rates"][1:] == [[name, f"{rate:+.5f}"] for name, rate in rates.items()]
    rows = page.tables["Evidence of both versions"][1:]
    for row, manifest in zip(rows, (before.manifest, after.manifest), strict=True):
        told = manifest.evidence
        assert told is not None
        assert row[:3] == [manifest.key, told.adapter, f"{100 * told.gain:+.1f}"]
        assert row[-1] == told.of
    rounds = page.tables["Cross-entropy by round"][1:]
    assert [row[0] for row in rounds] == ["0", "2"]
    kept = min(rounds, key=lambda row: float(row[1]))
    assert f"2 rounds were run, and the rates after round {kept[0]} are kept: {float(kept[1]):.3f}" in page.words
    assert len(page.tables["Judging clients"][1:]) == 5
    settings = after.manifest.settings["surgical"]
    assert page.tables["Settings"][1][:3] == ["surgical", json.dumps(settings.options), f"{100 * settings.gain:+.1f}"]
    budget = after.manifest.state_budgets["atp"]
    stored = page.tables["Budgets of stored states"][1]
    assert stored[:3] == ["atp", f"{budget.nbytes / 1e3:,.1f} kB", f"{budget.budget:.3g}"]
    default = str(after.default())
    assert f"{default[0].upper()}{default[1:]}." in page.words


def test_the_colours_are_those_of_the_dashboard() -> None:
    dashboard = (FILES / "style.css").read_text()
    end = STYLE.index("* { box-sizing")
    assert ":root" in STYLE[:end]
    assert dashboard.startswith(STYLE[:end])


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 360), ("dark", 360)])
def test_a_browser_shows_reports_without_a_request_and_axe_finds_nothing(
    scheme: str, width: int, browser: Any, axe: Callable[[Any], list[Any]], evaluated: Evaluated, tmp_path: Path
) -> None:
    report, learned = tmp_path / "report.html", tmp_path / "learned.html"
    report.write_text(evaluated.text)
    words = ["learn", "fashion-cnn/1", "--store", str(evaluated.store), "--data", str(evaluated.data), "--no-onnx"]
    words += ["--as", f"{scheme}-{width}", "--teachers", "3", "--judges", "5", "--teacher-images", "10"]
    words += ["--judge-images", "10", "--rounds", "2", "--lr", "0.01", "--tune", "none", "--shift", "feature"]
    assert main([*words, "--report", str(learned)]) == 0
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked, said = list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    for file in (report, learned):
        asked.clear()
        page.goto(file.as_uri())
        for summary in page.locator("summary").all():
            summary.click()
        assert page.locator("svg").count() >= 3
        assert axe(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert asked == [file.as_uri()]
    assert said == []
    page.close()
