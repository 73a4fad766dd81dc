"""The command itself: what it needs, and what it says when that is not there."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from acclimate_service.cli import main
from acclimate_service.models import named
from acclimate_service.settings import Settings, SettingsError
from acclimate_store import BundleKey, Catalogue

COMMANDS = [
    "serve",
    "demo",
    "round",
    "advise",
    "guard reset",
    "doctor",
    "clients list",
    "clients show",
    "clients export",
    "clients delete",
    "keys create",
    "models list",
    "models create",
    "models measure",
    "models show",
]
COMMANDS += ["models remove", "models verify", "models add-onnx", "models import-atp", "learn", "evaluate"]
NEED_EXTRA = ["serve", "round", "advise", "guard reset"]
NOT_SERVED = {
    "acclimate_learning",
    "httpx",
    "matplotlib",
    "onnx",
    "onnxscript",
    "pandas",
    "pyarrow",
    "scipy",
    "sympy",
    "timm",
}
NOT_SERVED |= {"torch._dynamo", "torch._inductor", "torchvision", "transformers", "triton"}
MISMATCH = "operator torchvision::nms does not exist"


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


def test_help_of_every_command_waits_for_nothing() -> None:
    code = """
import sys
from acclimate_service.cli import main
for command in sys.argv[1:]:
    try:
        main([*command.split(), "--help"])
    except SystemExit as end:
        assert end.code == 0, command
print({"torch", "numpy", "pydantic", "fastapi", "redis", "PIL"} & set(sys.modules))
"""
    done = python(code, *COMMANDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize("module", ["client_commands", "keys"])
def test_a_running_service_is_asked_without_torch(module: str) -> None:
    code = (
        f"import sys, acclimate_service.{module}; print({{'torch', 'numpy', 'pydantic', 'fastapi'}} & set(sys.modules))"
    )
    done = python(code)
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.slow
@pytest.mark.usefixtures("integration")
def test_a_small_network_is_served_without_what_only_others_need(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from acclimate_service.commands import Settings, open_replica
from acclimate_service.http.app import create_app
async def opened():
    async with open_replica(Settings(data_dir="{tmp_path}")) as replica:
        create_app(replica)
asyncio.run(opened())
print(sorted({NOT_SERVED} & set(sys.modules)))
"""
    done = python(code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"acclimate {version('acclimate')}\n"


def test_options_of_serve_are_settings_that_go_before_the_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[Settings] = []
    monkeypatch.setattr("acclimate_service.commands.serve", served.append)
    monkeypatch.setattr("acclimate_service.commands.set_up", lambda *_: None)  # it would change the log of all tests
    monkeypatch.setenv("ACCLIMATE_PORT", "1")
    monkeypatch.setenv("ACCLIMATE_HOST", "127.0.0.2")
    assert main(["serve", "--port", "8123", "--model", "cats/2", "--adapter", "atp", "--model-store", "shelf"]) == 0
    (settings,) = served
    assert (settings.port, settings.host, settings.model, settings.adapter) == (8123, "127.0.0.2", "cats/2", "atp")
    assert settings.model_store == Path("shelf")
    assert main(["serve", "--port", "many"]) == 2
    assert "ACCLIMATE_PORT: Input should be a valid integer" in capsys.readouterr().err


@pytest.mark.usefixtures("integration")
def test_commands_without_their_extra_say_which_they_need() -> None:
    code = """
import sys
sys.modules["fastapi"] = None
from acclimate_service.cli import main
for command in sys.argv[1:]:
    print(main(command.split()), flush=True)
"""
    done = python(code, *NEED_EXTRA)
    assert done.stdout.split() == ["2"] * len(NEED_EXTRA)
    assert done.stderr.splitlines() == [
        'acclimate: fastapi is not installed; pip install "acclimate[serve]"'
    ] * len(NEED_EXTRA)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("integration")
def test_the_demo_says_what_the_service_needs_that_it_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError('as if not installed', name='fastapi')")
    done = subprocess.run(
        [sys.executable, "-m", "acclimate_service.cli", "demo"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        'acclimate: fastapi is not installed; pip install "acclimate[serve]"',
        "acclimate: the service did not start; its messages are above",
    ]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder where torchvision is looked for, as if it had not been imported."""
    monkeypatch.syspath_prepend(tmp_path)
    known = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchvision"}
    for name in known:
        del sys.modules[name]
    yield tmp_path
    sys.modules.pop("torchvision", None)
    sys.modules.update(known)


def test_a_torchvision_that_does_not_fit_torch_is_one_clear_sentence(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is where only torch was installed again, from another place."""
    (elsewhere / "torchvision").mkdir()
    (elsewhere / "torchvision/__init__.py").write_text(f"raise RuntimeError({MISMATCH!r})")
    information = elsewhere / "torchvision-0.9.9.dist-info"
    information.mkdir()
    told = {"Metadata-Version": "2.1", "Name": "torchvision", "Version": "0.9.9", "Requires-Dist": "torch (==1.9.9)"}
    (information / "METADATA").write_text("".join(f"{name}: {value}\n" for name, value in told.items()))
    save_file({"weight": np.zeros(1)}, elsewhere / "weights.safetensors")
    command = f"models create x --arch torchvision:resnet18 --weights {elsewhere}/weights.safetensors"
    command += " --classes a,b --size 28 --mean 0,0,0 --std 1,1,1"
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("acclimate: torchvision 0.9.9 wants torch (==1.9.9) and finds 2.")
    assert f"({MISMATCH}); install both in one go" in err
    assert err.count("\n") == 1


@pytest.fixture
def catalogue(tmp_path: Path, request: pytest.FixtureRequest) -> Catalogue:
    shutil.copytree(request.config.rootpath / "model_store/bundles/fashion-cnn", tmp_path / "cats")
    return Catalogue(tmp_path)


def test_the_only_model_of_a_store_need_not_be_named(catalogue: Catalogue) -> None:
    shutil.copytree(catalogue.root / "cats/1", catalogue.root / "cats/2")
    assert named(None, catalogue) == BundleKey("cats")
    assert named("cats/1", catalogue) == BundleKey("cats", "1")


def test_of_several_models_one_has_to_be_named(catalogue: Catalogue) -> None:
    shutil.copytree(catalogue.root / "cats", catalogue.root / "dogs")
    with pytest.raises(SettingsError, match=r"^ACCLIMATE_MODEL: name one of the bundles in .*: cats, dogs$"):
        named(None, catalogue)


def test_a_store_without_a_model_says_how_one_is_made(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"holds no bundle; `acclimate models create` makes one"):
        named(None, Catalogue(tmp_path))
