"""Pictures as SVG elements. Each says in its label what a table beside it says in numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Final
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from acclimate_learning.report.page import STYLE, element, scrolled

WIDTH: Final = 760
_LEFT, _RIGHT, _TOP, _ROW = 150, 180, 26, 22
_HEIGHT: Final = 260
"""Of pictures that are not made of rows."""
_LONGEST: Final = 22
"""Characters of a name beside a row; its end is left out of longer ones, which tables give whole."""
_TICKS: Final = 6
_LEAST: Final = 1e-9
"""Differences of values below this, of the size of the values, are none."""
_SPREAD: Final = 5
"""Pixels by which marks of a row are set off, so that equal ones are seen."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: a value, the bounds of its interval if there is one, what stands beside it, and how it is."""

    name: str
    value: float
    note: str
    between: tuple[float, float] | None = None
    tone: str = ""  # good, bad or nothing of both


@dataclass(frozen=True, slots=True)
class Dots:
    """One row: marks, each a value with the number of its series, and their mean where that says something."""

    name: str
    marks: Sequence[tuple[float, int]]
    mean: float | None = None


def bars(label: str, rows: Sequence[Bar]) -> Element:
    """Values from zero to the left and right, with their intervals."""
    ends = [end for row in rows for end in (row.value, *(row.between or ()))]
    scale, parts = _across([0.0, *ends], len(rows))
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number + _ROW / 2
        left, right = sorted((scale(0), scale(row.value)))
        parts += [
            _name(row.name, y),
            element("rect", x=_px(left), y=_px(y - 6), width=_px(right - left), height=12, class_=f"bar {row.tone}"),
            element("text", row.note, x=WIDTH - _RIGHT + 12, y=_px(y + 4)),
        ]
        if row.between is not None:
            low, high = map(scale, row.between)
            parts.append(_line(low, y, high, y, "whisker"))
            parts += [_line(end, y - 4, end, y + 4, "whisker") for end in (low, high)]
    return _figure(label, parts, _TOP + _ROW * len(rows) + 8)


def dots(label: str, rows: Sequence[Dots], series: Sequence[str], limit: float | None = None) -> Element:
    """Marks of several series, each with a shape and a colour of its own, in rows; a limit is below zero."""
    ends = [value for row in rows for value, _ in row.marks]
    scale, parts = _across(ends if limit is None else [*ends, limit, 0.0], len(rows))
    bottom = _TOP + _ROW * len(rows)
    if limit is not None:
        parts.append(_line(scale(limit), _TOP, scale(limit), bottom, "limit"))
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number + _ROW / 2
        parts.append(_name(row.name, y))
        for place, (value, kind) in enumerate(row.marks):
            away = (place % 3 - 1) * _SPREAD if len(row.marks) > len(series) else 0
            parts.append(_mark(scale(value), y + away, kind))
        if row.mean is not None:
            parts.append(_line(scale(row.mean), y - 9, scale(row.mean), y + 9, "mean"))
    for number, name in enumerate(series):
        y = _TOP + _ROW * number + _ROW / 2
        parts += [
            _mark(WIDTH - _RIGHT + 20, y, number),
            element("text", _short(name), x=WIDTH - _RIGHT + 30, y=_px(y + 4)),
        ]
    return _figure(label, parts, max(bottom, _TOP + _ROW * len(series)) + 8)


def lines(
    label: str,
    x_name: str,
    y_name: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    guide: float | None = None,
) -> Element:
    """Curves over a common axis, from zero if the guide, a level to compare with, is not given."""
    xs = [x for curve in series.values() for x, _ in curve]
    ys = [y for curve in series.values() for _, y in curve]
    base = [0.0] if guide is None else [guide]
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(min(ys + base), max(ys + base))
    left, right, bottom = 60, WIDTH - _RIGHT, _HEIGHT - 40
    across, up = _scale(x_ticks, left, right), _scale(y_ticks, bottom, _TOP)
    parts = [element("text", y_name, x=8, y=14, class_="aside")]
    parts += [_line(left, up(tick), right, up(tick), "grid") for tick in y_ticks]
    parts += [_number(tick, left - 8, up(tick) + 4, "end") for tick in y_ticks]
    parts += [_number(tick, across(tick), bottom + 16, "middle") for tick in x_ticks]
    parts.append(
        element("text", x_name, x=_px((left + right) / 2), y=_HEIGHT - 8, text_anchor="middle", class_="aside")
    )
    if guide is not None:
        parts.append(_line(left, up(guide), right, up(guide), "limit"))
    for number, (name, curve) in enumerate(series.items()):
        way = " ".join(f"{_px(across(x))},{_px(up(y))}" for x, y in curve)
        parts.append(element("polyline", points=way, class_=f"line s{number % 4}"))
        parts += [_mark(across(x), up(y), number) for x, y in curve]
        y = _TOP + _ROW * number + _ROW / 2
        parts += [_mark(right + 20, y, number), element("text", _short(name), x=right + 30, y=_px(y + 4))]
    return _figure(label, parts, _HEIGHT)


def file(figure: Element) -> str:
    """The picture of a figure as a file of its own."""
    svg = next(figure.iter("svg"))
    _, _, width, height = svg.get("viewBox", "").split()
    svg.set("xmlns", "http://www.w3.org/2000/svg")
    svg.insert(0, element("style", STYLE))
    svg.insert(1, element("rect", width=width, height=height, class_="ground"))
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _figure(label: str, parts: Sequence[Element], height: float) -> Element:
    svg = element("svg", *parts, viewBox=f"0 0 {WIDTH} {_px(height)}", role="img", aria_label=label)
    return element("figure", scrolled(label, svg))


def _across(ends: Sequence[float], rows: int) -> tuple[Callable[[float], float], list[Element]]:
    """The scale of a picture made of rows, and its grid."""
    ticks = _ticks(min(ends), max(ends))
    scale, bottom = _scale(ticks, _LEFT + 12, WIDTH - _RIGHT), _TOP + _ROW * rows
    grid = [_line(scale(tick), _TOP, scale(tick), bottom, "grid" if tick else "zero") for tick in ticks]
    return scale, [*grid, *(_number(tick, scale(tick), _TOP - 8, "middle") for tick in ticks)]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers a round distance apart that hold both ends between them."""
    size = max(abs(low), abs(high))
    size = size if size > _LEAST else 1.0
    span = high - low if high - low > _LEAST * size else size
    rough = span / _TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = floor(low / step + 1e-9), max(ceil(high / step - 1e-9), floor(low / step + 1e-9) + 1)
    return [number * step for number in range(first, last + 1)]


def _scale(ticks: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (end - start)


def _mark(x: float, y: float, series: int) -> Element:
    """A circle, a cross, a square or a triangle."""
    look = f"mark s{series % 4}"
    match series % 4:
        case 0:
            return element("circle", cx=_px(x), cy=_px(y), r=3.5, class_=look)
        case 1:
            way = f"M{_px(x - 4)} {_px(y - 4)}l8 8m0 -8l-8 8"
        case 2:
            way = f"M{_px(x - 3)} {_px(y - 3)}h6v6h-6z"
        case _:
            way = f"M{_px(x)} {_px(y - 4)}l4 7h-8z"
    return element("path", d=way, class_=look)


def _line(x1: float, y1: float, x2: float, y2: float, look: str) -> Element:
    return element("line", x1=_px(x1), y1=_px(y1), x2=_px(x2), y2=_px(y2), class_=look)


def _name(text: str, y: float) -> Element:
    return element("text", _short(text), x=_LEFT, y=_px(y + 4), text_anchor="end")


def _number(value: float, x: float, y: float, anchor: str) -> Element:
    return element("text", f"{value:.6g}", x=_px(x), y=_px(y), text_anchor=anchor, class_="aside")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
