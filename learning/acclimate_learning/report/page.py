"""What a report is made of: elements whose text is escaped by whoever writes them out, tables, facts, and the page."""

import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final, Self, TypeAlias
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import torch

Child: TypeAlias = Element | str | None
STYLE: Final = Path(__file__).with_name("style.css").read_text()
"""The colours are those of the dashboard, so that one looks like the other."""
_NUMBERS: Final = len("+10.0 to +10.0  ")
"""Characters of a cell of numbers, at most."""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Nothing is asked for and nothing runs, whatever a name in the report says."""


@dataclass(frozen=True, slots=True)
class Made:
    """How a report came about.

    Args:
        words: of the command, without its name.
        at: when, UTC.
    """

    words: Sequence[str]
    at: datetime

    @classmethod
    def now(cls, words: Sequence[str]) -> Self:
        """By this command, now."""
        return cls(words, datetime.now(UTC))

    def facts(self) -> dict[str, str]:
        """Command, time and versions."""
        return {
            "Command": shlex.join(["acclimate", *self.words]),
            "Made at": f"{self.at:%Y-%m-%d %H:%M} UTC",
            "Versions": f"acclimate {version('acclimate')}, torch {torch.__version__}, Python "
            f"{platform.python_version()}, {platform.machine()}, {torch.get_num_threads()} threads",
        }


def element(tag: str, *children: Child, **attributes: str | float) -> Element:
    """An element with its children in order; `class_` and `aria_label` stand for `class` and `aria-label`."""
    found = Element(tag, {name.rstrip("_").replace("_", "-"): str(value) for name, value in attributes.items()})
    last: Element | None = None
    for child in children:
        if isinstance(child, Element):
            found.append(child)
            last = child
        elif child and last is None:
            found.text = (found.text or "") + child
        elif child and last is not None:
            last.tail = (last.tail or "") + child
    return found


def table(caption: str, heading: Sequence[str], rows: Sequence[Sequence[Child]], chosen: int | None = None) -> Element:
    """A table that may be scrolled; the first cell of each row names it, and one row may be the chosen one.

    Columns in which there is more than a few words are set as words, others as numbers.
    """
    wordy = [
        any(isinstance(cell, str) and len(cell) > _NUMBERS for cell in column) for column in zip(*rows, strict=True)
    ]
    looks = [{"class_": "words"} if words else {} for words in wordy] or [{}] * len(heading)
    cells = zip(heading, looks, strict=True)
    head = element("tr", *(element("th", name, scope="col", **look) for name, look in cells))
    body = element("tbody")
    for number, (name, *others) in enumerate(rows):
        row = element("tr", element("th", name, scope="row"))
        row.extend(element("td", each, **look) for each, look in zip(others, looks[1:], strict=True))
        if number == chosen:
            row.set("class", "chosen")
        body.append(row)
    found = element("table", element("caption", caption), element("thead", head), body)
    return scrolled(caption, found)


def scrolled(label: str, child: Element) -> Element:
    """A region that is scrolled where it has no room, by keys, too."""
    return element("div", child, class_="scroll", tabindex=0, role="region", aria_label=label)


def folded(summary: str, child: Element) -> Element:
    """What opens when somebody wants to know."""
    return element("details", element("summary", summary), child)


def facts(of: Mapping[str, str]) -> Element:
    """Names and what they are."""
    pairs = (element("div", element("dt", name), element("dd", what)) for name, what in of.items())
    return element("dl", *pairs, class_="facts")


def section(title: str, *children: Child) -> Element:
    """A part of the page under its heading; plain text is a paragraph."""
    parts = (element("p", each) if isinstance(each, str) else each for each in children)
    return element("section", element("h2", title), *parts)


def page(title: str, made: Made, *children: Element) -> str:
    """The whole file."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", **{"http-equiv": "Content-Security-Policy", "content": _POLICY}),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title} · Acclimate"),
        element("style", STYLE),
    )
    main = element("main", element("h1", title), *children, section("How this was made", facts(made.facts())))
    body = element("body", element("header", "Acclimate"), main)
    text = ElementTree.tostring(element("html", head, body, lang="en"), encoding="unicode", method="html")
    return f"<!doctype html>\n{text}\n"


def points(value: float) -> str:
    """A difference of accuracies in points."""
    return f"{100 * value:+.1f}"


def percent(value: float, digits: int = 1) -> str:
    """A share in per cent."""
    return f"{100 * value:.{digits}f} %"
