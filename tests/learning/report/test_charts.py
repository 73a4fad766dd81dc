"""Pictures: where things are is what they are."""

from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from acclimate_learning.report.charts import Bar, Dots, bars, dots, file, lines


def texts(of: Element) -> list[str]:
    return [each.text or "" for each in of.iter("text")]


def numbers_on_top(of: Element) -> dict[float, float]:
    """Positions by the numbers of the axis across."""
    found = (each for each in of.iter("text") if each.get("y") == "18")
    return {float(each.text or ""): float(each.get("x", "")) for each in found}


def position(axis: dict[float, float], value: float) -> float:
    """Where a value is by the axis."""
    low, high = min(axis), max(axis)
    return axis[low] + (value - low) / (high - low) * (axis[high] - axis[low])


def test_bars_begin_at_zero_and_end_at_their_value_with_their_interval() -> None:
    picture = bars("Gains", [Bar("up", 6.8, "+6.8", (3.4, 10.1), "good"), Bar("down", -4.0, "-4.0")])
    axis = numbers_on_top(picture)
    up, down = picture.iter("rect")
    assert up.get("class") == "bar good"
    for rect, low, high in ((up, 0, 6.8), (down, -4, 0)):
        left, width = float(rect.get("x", "")), float(rect.get("width", ""))
        assert left == pytest.approx(position(axis, low), abs=0.1)
        assert left + width == pytest.approx(position(axis, high), abs=0.2)
    whisker = next(each for each in picture.iter("line") if each.get("class") == "whisker")
    ends = [float(whisker.get(name, "")) for name in ("x1", "x2")]
    assert ends == pytest.approx([position(axis, 3.4), position(axis, 10.1)], abs=0.1)
    assert {"up", "down", "+6.8", "-4.0"} <= set(texts(picture))


def test_marks_are_where_their_values_are_and_shaped_by_their_series() -> None:
    picture = dots("Clients", [Dots("atp", [(3.0, 0), (-5.0, 1)], mean=-1.0)], ("well", "harmed"), limit=-2.0)
    axis = numbers_on_top(picture)
    assert min(axis) <= -5 < 0 < 3 <= max(axis)
    circle = next(picture.iter("circle"))
    assert float(circle.get("cx", "")) == pytest.approx(position(axis, 3.0), abs=0.1)
    cross = next(each for each in picture.iter("path") if each.get("class") == "mark s1")
    assert cross.get("d", "").startswith(f"M{position(axis, -5.0) - 4:.1f}".removesuffix(".0"))
    limit = next(each for each in picture.iter("line") if each.get("class") == "limit")
    assert float(limit.get("x1", "")) == pytest.approx(position(axis, -2.0), abs=0.1)
    assert {"well", "harmed", "atp"} <= set(texts(picture))


def test_curves_rise_where_values_do() -> None:
    picture = lines("Loss", "round", "loss", {"a": [(0, 1.0), (5, 0.5), (10, 0.75)]}, guide=1.0)
    (curve,) = picture.iter("polyline")
    xs, ys = zip(*(map(float, point.split(",")) for point in curve.get("points", "").split()), strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert ys[1] - ys[0] == pytest.approx(2 * (ys[1] - ys[2]), abs=0.3)
    guide = next(each for each in picture.iter("line") if each.get("class") == "limit")
    assert float(guide.get("y1", "")) == pytest.approx(ys[0], abs=0.1)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5))
@example([0.0])
@example([1e-12])
@example([5e-324])
@example([0.0, 1e-300])
@example([1e6, -1e6, 1e-9])
@example([-3.0, -3.0])
@example([5e5, 5e5 + 1e-9])
def test_axes_hold_whatever_is_to_be_shown(values: list[float]) -> None:
    for picture in (
        bars("b", [Bar("x", value, "") for value in values]),
        dots("d", [Dots("x", [(value, 0)]) for value in values], ("s",)),
        lines("l", "x", "y", {"s": [(float(place), value) for place, value in enumerate(values)]}),
    ):
        places = [float(each.get("cx", 0)) for each in picture.iter("circle")]
        places += [float(each.get("x", 0)) + float(each.get("width", 0)) for each in picture.iter("rect")]
        assert all(0 <= place <= 760 for place in places)


def test_long_names_are_cut_and_a_picture_may_be_a_file() -> None:
    picture = bars("Gains", [Bar("a_name_that_is_too_long_to_be_shown", 1.0, "<&>")])
    assert "a_name_that_is_too_lo…" in texts(picture)
    svg = ElementTree.fromstring(file(picture))
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert [each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")][-1] == "<&>"
