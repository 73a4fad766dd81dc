"""Several models in one process: each has its clients for itself."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acclimate_client.errors import ClientUnknownError, StateMismatchError
from acclimate_service.models import settings_by_model
from acclimate_service.settings import Settings, SettingsError, read_settings
from acclimate_store.samples import load_streams

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "model_store" / "bundles" / "fashion-cnn" / "1"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped bundle under two names; the second calls one of its classes otherwise."""
    root = tmp_path_factory.mktemp("store")
    for name in ("one", "two"):
        folder = Path(shutil.copytree(BUNDLE, root / name / "1"))
        text = (folder / "manifest.json").read_text().replace('"name": "fashion-cnn"', f'"name": "{name}"')
        (folder / "manifest.json").write_text(
            text if name == "one" else text.replace('"T-shirt/top"', '"Shirt, short"')
        )
    return root


@pytest.fixture(scope="module")
def both(run_service: Callable[..., Any], store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    data_dir = tmp_path_factory.mktemp("both")
    with run_service(model_store=store, models=("one", "two"), data_dir=data_dir, max_queue_ms=60_000) as replica:
        yield replica


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    (stream, *_) = load_streams(ROOT / "model_store" / "samples" / "fashion-hybrid" / "streams.npz")
    return [stream.images[start : start + 20] for start in range(0, 80, 20)]


@contextmanager
def clients(replica: Any) -> Iterator[tuple[Any, Any]]:
    with replica.sdk() as one, replica.sdk(model="two") as two:
        yield one, two


def test_a_client_of_the_same_id_is_another_one_for_each_model(both: Any, batches: list[Any]) -> None:
    with clients(both) as (one, two):
        one.configure("cam", "fedcal")
        two.configure("cam", "em")
        for batch in batches:
            first, second = one.predict("cam", batch), two.predict("cam", batch)
        assert (first.adapter, second.adapter) == ("fedcal", "em")
        assert (first.model.name, second.model.name) == ("one", "two")
        assert first.state.version == second.state.version == 5
        two.reset("cam")
        assert (one.get("cam").state.version, two.get("cam").state.version) == (5, 6)
        with pytest.raises(StateMismatchError):
            two.import_state("other", one.export_state("cam"))
        two.delete("cam")
        assert one.get("cam").state.version == 5
        with pytest.raises(ClientUnknownError):
            two.get("cam")
        assert one.predict("cam", batches[0]).state.status == "warm"


def test_a_key_of_one_model_is_free_for_the_other(both: Any, batches: list[Any]) -> None:
    with clients(both) as (one, two):
        given = [each.predict("keyed", batches[0], idempotency_key="k") for each in (one, two)]
        assert [each.state.replayed for each in given] == ["none", "none"]
        again = two.predict("keyed", batches[0], idempotency_key="k")
        assert again.state.replayed in ("stored", "recomputed")
        assert np.allclose(again.confidence, given[1].confidence)


def test_the_default_model_has_both_routes(both: Any, batches: list[Any]) -> None:
    with both.sdk() as short, both.sdk(model="one") as long:
        short.predict("twice", batches[0])
        assert long.predict("twice", batches[1]).state.version == 2


def test_keys_in_redis_are_those_of_two_tenants(both: Any, batches: list[Any]) -> None:
    with clients(both) as (one, two):
        one.predict("stored", batches[0])
        two.predict("stored", batches[0])
    tenants = {key.decode().partition("{")[2].partition("/")[0] for key in both.redis.keys("acc:{*/stored}:*")}
    assert tenants == {"default", "default~two"}


def test_models_are_listed_the_default_one_first(both: Any) -> None:
    told = both.http.get("/models").json()["models"]
    assert [(each["name"], each["default"]) for each in told] == [("one", True), ("two", False)]
    assert both.http.get("/models/two/adapters").json()["model"]["name"] == "two"


@pytest.mark.parametrize("model", ["one", "two"])
def test_a_method_that_a_path_does_not_take_is_405_with_those_that_it_takes(model: str, both: Any) -> None:
    paths = both.http.get("/openapi.json").json()["paths"]
    for prefix in ("", "/models/{model}"):
        assert f"{prefix}/clients/{{client_id}}/predict" in paths
    for path, operations in paths.items():
        taken = {method.upper() for method in operations}
        taken |= {"HEAD"} if "GET" in taken else set()
        for method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"} - taken:
            reply = both.http.request(method, path.replace("{client_id}", "cam").replace("{model}", model))
            assert (path, method, reply.status_code) == (path, method, 405)
            assert set(reply.headers["allow"].split(", ")) == taken


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH"])
@pytest.mark.parametrize("path", ["/models/three/clients/cam/predict", "/models/three/adapters", "/models/three"])
def test_another_model_is_answered_with_those_that_there_are(path: str, method: str, both: Any) -> None:
    reply = both.http.request(method, path)
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")
    assert "served are one, two" in reply.json()["detail"]


@pytest.mark.parametrize("path", ["/models/two/clients/a/b", "/models/two/nothing", "/models/two"])
def test_a_path_that_leads_nowhere_under_a_model_is_404_and_is_not_about_models(path: str, both: Any) -> None:
    reply = both.http.get(path)
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")
    assert "served are" not in reply.json()["detail"]
    assert ("a client id holds no '/'" in reply.json()["detail"]) is ("clients" in path)


def test_one_model_is_answered_while_the_other_is_flooded_and_both_are_counted(
    both: Any, batches: list[Any], pool: Any
) -> None:
    with clients(both) as (one, two):
        calls = [pool.submit(one.predict, f"flood-{number}", batches[0]) for number in range(12)]
        assert two.predict("quiet", batches[0]).model.name == "two"
        assert {call.result().model.name for call in calls} == {"one"}
    assert both.metric("acclimate_state_sessions") >= 13


def test_the_list_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCLIMATE_MODELS", "a, b/2 ,c")
    assert read_settings().models == ("a", "b/2", "c")
    assert [(each.model, each.tenant) for each in settings_by_model(read_settings())] == [
        ("a", "default"),
        ("b/2", "default~b"),
        ("c", "default~c"),
    ]
    monkeypatch.setenv("ACCLIMATE_MODEL", "b/2")
    assert [each.model for each in settings_by_model(read_settings())] == ["b/2", "a", "c"]


def test_models_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = settings_by_model(Settings(models=("a", "b"), cache_bytes=100, drain_budget_s=4))
    assert (first.cache_bytes, second.cache_bytes, first.drain_budget_s) == (50, 50, 2)
    assert settings_by_model(Settings(model="a"))[0] == Settings(model="a")


def test_two_versions_of_a_model_are_refused() -> None:
    with pytest.raises(SettingsError, match="ACCLIMATE_MODELS: a is there in two versions"):
        settings_by_model(Settings(models=("a/1", "b", "a/2")))


@pytest.mark.parametrize(("length", "fits"), [(63, True), (64, False)])
def test_a_tenant_with_the_name_of_a_model_must_not_be_too_long(length: int, fits: bool) -> None:
    settings = Settings(tenant="t" * 64, models=("a", "b" * length))
    if fits:
        assert len(settings_by_model(settings)[1].tenant) == 128
    else:
        with pytest.raises(SettingsError, match=r"ACCLIMATE_TENANT: t+~b+ has more than 128 characters"):
            settings_by_model(settings)
