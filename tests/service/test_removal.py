"""Versions leave the store by `acclimate models remove`, but not while clients live on them."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from acclimate_service.cli import main
from acclimate_store import BundleKey, Catalogue
from acclimate_store.samples import load_streams
from acclimate_store.versions import publish, renewed

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "model_store" / "bundles"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Versions 1 and 2 differ in a quantity that `atp` reads, 3 has what 2 has; they share the weights."""
    root = tmp_path / "store"
    for file in (SHIPPED / "fashion-cnn/1").iterdir():
        (root / "one/1").mkdir(parents=True, exist_ok=True)
        text = file.read_bytes()
        (root / "one/1" / file.name).write_bytes(text.replace(b'"name": "fashion-cnn"', b'"name": "one"'))
    catalogue = Catalogue(root)
    source = catalogue.load("one").model.source
    halved = {name: rate / 2 for name, rate in (source.rates or {}).items()}
    for version in ("2", "3"):
        manifest = renewed(catalogue, catalogue.manifest("one", "1"), BundleKey("one", version), "")
        publish(catalogue, BundleKey("one", "1"), manifest, replace(source, rates=halved), {})
    return root


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder without any setting of the service."""
    for name in list(os.environ):
        if name.startswith("ACCLIMATE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def remove(store: Path, *words: str) -> int:
    return main(["models", "remove", *words, "--store", str(store)])


def versions(store: Path) -> list[str]:
    return [str(key) for key in Catalogue(store).list()]


def test_a_version_goes_and_files_that_others_share_stay(
    store: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = store / "one/2/model.safetensors"
    assert shared.samefile(store / "one/1/model.safetensors")
    assert remove(store, "one/1") == 0
    told = capsys.readouterr()
    assert told.out == "one/1: removed\n"
    assert "no clients were looked for: ACCLIMATE_REDIS_URL names no Redis, and there is no .data" in told.err
    assert versions(store) == ["one/2", "one/3"]
    assert Catalogue(store).verify("one", "2") == ()
    assert {path.name for path in (store / "one").iterdir()} == {"2", "3"}


def test_without_a_version_the_whole_model_goes(store: Path, folder: Path) -> None:
    assert remove(store, "one") == 0
    assert list(store.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "reason"), [("one/4", "there is no one/4"), ("two", "there is no two"), ("a/b/c", "")]
)
def test_what_is_not_there_is_said(
    name: str, reason: str, store: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert remove(store, name) == 2
    assert reason in capsys.readouterr().err
    assert len(versions(store)) == 3


def test_what_the_file_system_does_not_allow_is_said(
    store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    assert remove(store, "one/2") == 2
    assert "one/2 cannot be removed: " in capsys.readouterr().err
    assert len(versions(store)) == 3


@pytest.mark.integration
@pytest.mark.parametrize("where", ["running", "named", "stopped"])
def test_a_version_stays_while_clients_live_on_it(
    where: str,
    run_service: Callable[..., Any],
    store: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the Redis that is named, in the private one of a service that runs, or has run, in this folder."""
    (stream, *_) = load_streams(ROOT / "model_store" / "samples" / "fashion-hybrid" / "streams.npz")

    def send(replica: Any, client: str) -> None:
        with replica.sdk() as sdk:
            sdk.predict(client, stream.images[:20])

    def look(client_count: int, key: str) -> None:
        assert remove(store, key) == 1
        told = capsys.readouterr()
        assert f"{key}: {client_count} client{'s live' if client_count > 1 else ' lives'} on it" in told.err
        assert "nothing was removed; serve another version until its clients have come over" in told.err
        assert told.out == ""
        assert len(versions(store)) == 3

    with run_service(model="one/1", adapter="atp", model_store=store, data_dir=Path(".data")) as first:
        url = first.service.settings.redis_url or first.service.private_redis.url
        for client in ("a", "b"):
            send(first, client)
        if where == "named":
            monkeypatch.setenv("ACCLIMATE_REDIS_URL", url)
        if where != "stopped":
            look(2, "one/1")
            assert remove(store, "one") == 1
            assert "one/1: 2 clients live on it" in capsys.readouterr().err
        with run_service(model="one/2", adapter="atp", model_store=store, redis_url=url) as second:
            send(second, "a")
            if where != "stopped":
                look(1, "one/1")
                assert remove(store, "one/2") == 0, "version 3 is the same to its client"
                assert versions(store) == ["one/1", "one/3"]
                return
    look(1, "one/1")
    assert remove(store, "one/1", "--force") == 0
    assert capsys.readouterr().out == "one/1: removed\n"
    assert versions(store) == ["one/2", "one/3"]
