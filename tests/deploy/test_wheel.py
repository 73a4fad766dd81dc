"""What users install: the product, whole, and nothing else. It works in an empty folder and fetches nothing."""

import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / name for name in ("service/acclimate_service", "adapters/acclimate_adapters")]
PACKAGES += [ROOT / name for name in ("model_store/acclimate_store", "learning/acclimate_learning")]
LOCAL_ONLY = """
import sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        address = arguments[1] if event == "socket.connect" else arguments[0]
        host = address[0] if isinstance(address, tuple) else address
        if not (host is None or str(host).startswith(("127.0.0.1", "/"))):
            raise OSError(f"nothing may be fetched, and {host} is asked")
sys.addaudithook(refuse)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(built):
    with ZipFile(built) as archive:
        return {PurePosixPath(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Commands of an environment with the wheel alone; what it depends on is that of this one, but for uvloop."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home)
    (library,) = home.glob("lib/*/site-packages")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        home / "bin/python",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, built], check=True)
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (library / "shared.pth").write_text("\n".join(shared))  # its .pth files, such as those of the sources, are not read
    (library / "uvloop.py").write_text("raise ImportError('not installed')")
    (library / "sitecustomize.py").write_text(LOCAL_ONLY)
    return home / "bin"


@pytest.fixture
def variables():
    return {name: value for name, value in os.environ.items() if not name.startswith(("ACCLIMATE_", "PYTHON"))}


def test_it_holds_every_module_and_script_of_the_product_and_nothing_else(wheel):
    product = {
        PurePosixPath(path.relative_to(package.parent))
        for package in PACKAGES
        for path in package.rglob("*")
        if path.suffix in {".py", ".lua", ".typed", ".css"} or ({"data", "static"} & {*path.parts} and path.is_file())
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


def test_the_network_of_the_demo_has_a_few_kilobytes_and_its_images_fewer_than_one_megabyte():
    data = ROOT / "service/acclimate_service/demo/data"
    assert sum(path.stat().st_size for path in data.glob("bundles/*/*/model.safetensors")) < 20_000
    assert sum(path.stat().st_size for path in data.rglob("*") if path.is_file()) < 1_000_000


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel_in_an_empty_folder_and_fetches_nothing(installed, variables, tmp_path):
    told = subprocess.run(
        [installed / "python", "-c", "import acclimate_service; print(acclimate_service.__file__)"],
        cwd=tmp_path, env=variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout.startswith(str(installed.parent))
    command = [installed / "acclimate", "demo", "--json", "shown.json"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    accuracy = json.loads((tmp_path / "shown.json").read_text())["accuracy"]
    assert sum(accuracy["atp online"]) > sum(accuracy["none"])
    assert [path.name for path in tmp_path.iterdir()] == ["shown.json"]


@pytest.mark.slow
def test_a_model_is_created_and_served_from_the_wheel_in_an_empty_folder(installed, variables, tmp_path):
    code = "import torch, acclimate_store.shallow_cnn as m; torch.save(m.ShallowCNN(2).state_dict(), 'weights.pt')"
    create = [installed / "acclimate", "models", "create", "pets", "--arch", "acclimate:shallow_cnn", "--mean", "0.5"]
    create += ["--weights", "weights.pt", "--classes", "cat,dog", "--std", "0.5"]
    for command in ([installed / "python", "-c", code], create):
        subprocess.run(command, cwd=tmp_path, env=variables, check=True, capture_output=True)
    assert (tmp_path / "model_store/bundles/pets/1/manifest.json").is_file()
    serve = subprocess.Popen(
        [installed / "acclimate", "serve"],
        cwd=tmp_path, env={**variables, "ACCLIMATE_PORT": "0"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert serve.stdout.readline().startswith("acclimate: serving pets/1 at http://127.0.0.1:")
    serve.terminate()
    serve.communicate(timeout=60)
    assert serve.returncode == 0
