"""What users install: the product, whole, and nothing else."""

import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / name for name in ("service/acclimate_service", "adapters/acclimate_adapters")]
PACKAGES += [ROOT / name for name in ("model_store/acclimate_store", "learning/acclimate_learning")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.iterdir()
    with ZipFile(path) as archive:
        return {PurePosixPath(name) for name in archive.namelist()}


def test_it_holds_every_module_and_script_of_the_product_and_nothing_else(wheel):
    product = {
        PurePosixPath(path.relative_to(package.parent))
        for package in PACKAGES
        for path in package.rglob("*")
        if path.suffix in {".py", ".lua", ".typed"}
    }
    assert any(path.suffix == ".lua" for path in product)
    assert product == {path for path in wheel if not path.parts[0].endswith(".dist-info")}


def test_what_only_benchmarks_and_tests_need_is_not_installed_with_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    installed = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["serve"]]
    names = {line.split(">")[0].split("[")[0] for line in installed}
    assert not names & {line.split(">")[0] for group in groups.values() for line in group}
    assert "matplotlib" not in names
