"""The gains of adapters as a picture."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from acclimate_store.manifest import Evidence

_ROW, _LEFT, _WIDTH = 22, 150, 640


def gains_picture(evidence: Sequence[Evidence]) -> str:
    """An SVG with the gain of each adapter in points, its interval as a line, and the share of clients harmed."""
    ordered = sorted(evidence, key=lambda each: -each.gain)
    low = min([0.0, *(each.low for each in ordered)])
    high = max([0.01, *(each.high for each in ordered)])
    height = _ROW * len(ordered) + 40

    def x(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - 110)

    rows = [f'<line x1="{x(0):.1f}" x2="{x(0):.1f}" y1="24" y2="{height - 12}" stroke="#888"/>']
    for number, each in enumerate(ordered):
        y = 34 + _ROW * number
        colour = "#2a7" if not each.obstacle else "#999" if each.low <= 0 <= each.high else "#c55"
        left, right = sorted((x(0), x(each.gain)))
        rows += [
            f'<text x="{_LEFT - 8}" y="{y + 5}" text-anchor="end">{escape(each.adapter)}</text>',
            f'<rect x="{left:.1f}" y="{y - 6}" width="{right - left:.1f}" height="12" fill="{colour}"/>',
            f'<line x1="{x(each.low):.1f}" x2="{x(each.high):.1f}" y1="{y}" y2="{y}" stroke="#222"/>',
            f'<text x="{_WIDTH - 4}" y="{y + 5}" text-anchor="end">{100 * each.gain:+.1f}, '
            f"{100 * each.harmed:.0f} % harmed</text>",
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13"><rect width="{_WIDTH}" height="{height}" fill="white"/>'
        '<text x="8" y="16">gain over the frozen model in points, with its 95 % interval</text>'
        + "".join(rows)
        + "</svg>\n"
    )
