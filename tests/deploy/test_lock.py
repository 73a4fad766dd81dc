"""What the images are made of is locked: every requirement is met, every file has its hash, and no index is named."""

import json
import re
import subprocess
import tomllib
from itertools import chain
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


def test_what_is_tested_is_held_to_versions_that_every_requirement_allows() -> None:
    """Of what is installed here, all but pip's own and our packages is in the list, and no file names an index."""
    lines = [line for line in (ROOT / ".ci/constraints.txt").read_text().splitlines() if not line.startswith("#")]
    locked = [Requirement(line) for line in lines]
    assert all(re.fullmatch(r"==[^,*]+", str(each.specifier)) for each in locked)
    here = [each for each in locked if each.marker is None or each.marker.evaluate()]
    versions = {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in here}
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    extras = PROJECT["optional-dependencies"]
    wanted = [
        *PROJECT["dependencies"],
        *extras["serve"],
        *extras["cpu"],
        *extras["embedded"],
        *chain(*groups.values()),
    ]
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate():
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
    assert "--constraint .ci/constraints.txt" in (ROOT / "Makefile").read_text()


def test_an_image_without_cuda_has_all_else_with_its_hashes(tmp_path: Path) -> None:
    (tmp_path / "lock.txt").write_text(lock("cpu"))
    subprocess.run([ROOT / "deploy/without-cuda.sh", "lock.txt"], cwd=tmp_path, check=True)
    torch, others = (tmp_path / "torch.txt").read_text().split(), (tmp_path / "others.txt").read_text()
    versions = pinned("cpu")
    assert torch == [f"torch=={versions['torch']}", f"torchvision=={versions['torchvision']}"]
    left = {canonicalize_name(name) for name, *_ in PIN.findall(others)}
    gone = {canonicalize_name(name) for name, *_ in PIN.findall(lock("cpu"))} - left
    assert {"torch", "torchvision", "triton", "nvidia-cublas"} <= gone
    assert all(name in ("torch", "torchvision", "triton") or name.startswith(("nvidia-", "cuda-")) for name in gone)
    assert {"numpy", "fastapi", "onnxruntime", "redis"} <= left
    assert not PIN.sub("", others).strip(), "nothing but pins with their hashes"


def test_the_images_have_the_runtime_that_they_are_named_for() -> None:
    assert {"onnxruntime", "onnxruntime-gpu"} & pinned("cpu").keys() == {"onnxruntime"}
    assert {"onnxruntime", "onnxruntime-gpu"} & pinned("gpu").keys() == {"onnxruntime-gpu"}
