"""What the images are made of is locked: every requirement is met, every file has its hash, and no index is named."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIN = re.compile(
    r"^([A-Za-z0-9._-]+)==([^\s;]+)(?: *; *([^\\\n]+?))?((?: *\\\n +--hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE
)
IMAGE = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "python_version": "3.11"}
RUNTIMES = ["cpu", "gpu"]


def lock(runtime: str) -> str:
    return (ROOT / f"deploy/requirements-{runtime}.txt").read_text()


def pinned(runtime: str) -> dict[str, Version]:
    """Versions of an image, by name."""
    found = {}
    for name, version, marker, _ in PIN.findall(lock(runtime)):
        line = Requirement(f"{name}=={version}" + (f"; {marker}" if marker else ""))
        if line.marker is None or line.marker.evaluate({**IMAGE, "python_full_version": "3.11.9"}):
            found[canonicalize_name(name)] = Version(version)
    return found


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_requirement_of_an_image_is_pinned_to_a_version_that_it_allows(runtime: str) -> None:
    versions, extras = pinned(runtime), PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["serve"], *extras["otel"], *extras[runtime]]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_lock_holds_pins_with_hashes_and_no_address(runtime: str) -> None:
    left = PIN.sub("", lock(runtime))
    assert all(not line or line.startswith("#") for line in left.splitlines()), left
    assert "://" not in lock(runtime)
    assert "index" not in left


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_bill_of_materials_has_every_pin_with_its_hashes(program, tmp_path: Path, runtime: str) -> None:
    command = [program("cyclonedx-py"), "requirements", f"deploy/requirements-{runtime}.txt"]
    options = ["--pyproject", "pyproject.toml", "--of", "JSON", "--output-file", str(tmp_path / "sbom.json")]
    subprocess.run([*command, *options], cwd=ROOT, check=True)
    bill = json.loads((tmp_path / "sbom.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "acclimate")
    parts = {(canonicalize_name(each["name"]), each["version"]): each for each in bill["components"]}
    for name, version in pinned(runtime).items():
        part = parts[name, str(version)]
        assert part["purl"].endswith(f"@{version}")
        assert part["externalReferences"][0]["hashes"]


def test_the_images_have_the_runtime_that_they_are_named_for() -> None:
    assert {"onnxruntime", "onnxruntime-gpu"} & pinned("cpu").keys() == {"onnxruntime"}
    assert {"onnxruntime", "onnxruntime-gpu"} & pinned("gpu").keys() == {"onnxruntime-gpu"}
