from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from acclimate_bench.accuracy.plot import draw_adapters, draw_gains
from acclimate_bench.accuracy.report import Report
from acclimate_bench.errors import BenchError


def words(svg: Path) -> set[str]:
    return {(element.text or "").strip() for element in ElementTree.parse(svg).iter() if element.tag.endswith("text")}


def test_gains_are_drawn_as_png_and_svg(report: Report, tmp_path: Path) -> None:
    png, svg = draw_gains(report, tmp_path / "gains")
    assert (png.name, svg.name) == ("gains.png", "gains.svg")
    with Image.open(png) as image:
        assert image.format == "PNG"
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 10
    assert {"label", "hybrid", "bbse_soft", "bbse_hard", "bn_adapt+em", "+7.5", "-17.5"} <= words(svg)


def test_clients_that_were_harmed_are_counted_beside_the_gains(report: Report, tmp_path: Path) -> None:
    assert {"1/2", "2/2", "clients that lost more than 2 points"} <= words(draw_gains(report, tmp_path / "gains")[1])


def test_neither_the_baseline_nor_methods_with_labels_are_among_the_gains(report: Report, tmp_path: Path) -> None:
    assert not {"none", "fedthe"} & words(draw_gains(report, tmp_path / "gains")[1])


def test_a_name_with_a_dot_keeps_it(report: Report, tmp_path: Path) -> None:
    assert [path.name for path in draw_gains(report, tmp_path / "v1.2")] == ["v1.2.png", "v1.2.svg"]


def test_every_adapter_gets_a_picture_with_its_variants_and_the_chains_share_one(
    report: Report, tmp_path: Path
) -> None:
    drawn = draw_adapters(report, tmp_path)
    assert [path.name for path in drawn] == ["bbse.svg", "chains.svg", "fedthe.svg"]
    assert {"no adaptation", "bbse_soft", "bbse_hard", "label", "hybrid", "85.0", "60.0"} <= words(drawn[0])
    assert any("after 40 labelled ones" in word for word in words(drawn[2]))


def test_equal_reports_give_equal_files(report: Report, tmp_path: Path) -> None:
    first, second = ((tmp_path / name) for name in ("one", "two"))
    for folder in (first, second):
        folder.mkdir()
        draw_gains(report, folder / "gains")
        draw_adapters(report, folder)
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_a_report_without_gains_is_refused(report: Report, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no gains to draw"):
        draw_gains(report.only(lambda r: r.method in ("none", "fedthe")), tmp_path / "gains")


def test_a_place_that_is_not_there_is_refused(report: Report, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot write"):
        draw_gains(report, tmp_path / "absent" / "gains")
