"""How the benchmarks of cost show what they found."""

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Report:
    """Tables that are printed as they grow, and kept for a JSON file."""

    tables: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    _columns: tuple[str, ...] = ()

    def table(self, title: str, *columns: str) -> None:
        """Begin a table.

        Raises:
            ValueError: there is one of this title.
        """
        if title in self.tables:
            raise ValueError(f"there is a table already with the title {title!r}")
        self._columns = columns
        self.tables[title] = []
        print(f"\n{title}\n{'':<46}" + "".join(f"{column:>18}" for column in columns))

    def row(self, name: str, *cells: object) -> None:
        """Add a row to the latest table; numbers are printed with two decimals."""
        rows = list(self.tables.values())[-1]
        rows.append({"name": name, **dict(zip(self._columns, cells, strict=True))})
        print(f"{name:<46}" + "".join(f"{_printed(cell):>18}" for cell in cells), flush=True)

    def finish(self, path: Path | None) -> None:
        """Write all tables as JSON, title -> rows, if a file was asked for."""
        if path:
            path.write_text(json.dumps(self.tables, indent=1) + "\n", encoding="utf-8")


def verdict(value: float, limit: float | None) -> str:
    """Whether a figure keeps to its limit, if it has one."""
    return "" if limit is None else f"<= {limit:g} {'met' if value <= limit else 'MISSED'}"


def _printed(cell: object) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
