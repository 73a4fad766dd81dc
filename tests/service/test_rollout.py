"""Versions are loaded, given clients, taken back and unloaded while two replicas serve them."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from acclimate_service.cli import main
from acclimate_service.rollout import Rollout, place_of
from acclimate_service.shadow import MOST_WAITING
from acclimate_service.state import ClientScope
from acclimate_store import Catalogue, write_bundle
from acclimate_store.architectures import build
from acclimate_store.files import MODEL_FILE, sha256
from acclimate_store.samples import load_streams

ROOT = Path(__file__).parents[2]
BUNDLES = ROOT / "model_store" / "bundles"
BATCH = 20
CLIENTS = [f"cam-{number}" for number in range(12)]


def make_store(root: Path, *versions: str) -> Path:
    """Versions of the shipped network: 2 has other weights, 1.1 only says another licence, 3 answers otherwise."""
    shipped = Catalogue(BUNDLES).load("fashion-cnn")
    told, weights = shipped.manifest, load_file(BUNDLES / "fashion-cnn/1" / MODEL_FILE)

    def publish(version: str, weights: Mapping[str, Tensor], **changes: Any) -> None:
        net = build(told.architecture, told.architecture_options)
        net.load_state_dict(weights)
        named = {"name": "fashion", "version": version, "files": {}, **changes}
        write_bundle(root, told.model_copy(update=named), net, shipped.model.source)

    other = {name: 0.99 * tensor if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    for version in versions:
        publish(version, other if version == "2" else weights, **({"licence": "MIT"} if version == "1.1" else {}))
    if "3" in versions:
        folder = root / "fashion/3"
        weights["linear5.bias"][4] += 3
        save_file(weights, folder / MODEL_FILE)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][MODEL_FILE] = sha256(folder / MODEL_FILE)
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return root


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("versions"), "1", "1.1", "2", "3")


Serve = Callable[..., tuple[Any, ...]]


@pytest.fixture
def serve(run_service: Callable[..., Any], store: Path, tmp_path: Path) -> Iterator[Serve]:
    """Serve `fashion/1` by some replicas on one Redis."""
    with ExitStack() as stack:

        def serve(number: int = 2, **settings: Any) -> tuple[Any, ...]:
            begun: list[Any] = []
            for each in range(number):
                url = begun[0].service.settings.redis_url if begun else None
                own = {"model": "fashion/1", "model_store": store, "data_dir": tmp_path, "replica": f"r{each}"}
                own["max_queue_ms"] = 60_000
                begun.append(stack.enter_context(run_service(**{**own, "redis_url": url, **settings})))
            return tuple(begun)

        yield serve


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    (stream, *_) = load_streams(ROOT / "model_store" / "samples" / "fashion-hybrid" / "streams.npz")
    return [stream.images[start : start + BATCH] for start in range(0, 5 * BATCH, BATCH)]


def send(replica: Any, client: str, images: Any, **options: Any) -> Any:
    with replica.sdk() as sdk:
        return sdk.predict(client, images, probabilities=True, **options)


def load(replica: Any, version: str) -> Any:
    return replica.http.post(f"/v2/repository/models/fashion/load?version={version}")


def unload(replica: Any, query: str = "") -> Any:
    return replica.http.post(f"/v2/repository/models/fashion/unload{query}")


def look(replica: Any) -> Any:
    reply = replica.http.get("/models/fashion/rollout")
    assert reply.status_code == 200, reply.text
    return reply.json()


def answer_by(replica: Any, default: str, canary: str | None = None, share: float = 0.0) -> Any:
    wanted = {"default": default, "canary": canary and {"version": canary, "share": share}}
    return replica.http.put("/models/fashion/rollout", json=wanted)


@pytest.fixture
def rolled(wait_until: Any) -> Callable[..., None]:
    """Change who answers, and wait until all replicas have followed."""

    def change(replica: Any, *wanted: Any) -> None:
        wait_until(
            lambda: all(set(filter(None, wanted[:2])) <= set(each["loaded"]) for each in look(replica)["replicas"])
        )
        reply = answer_by(replica, *wanted)
        assert reply.status_code == 200, reply.text
        wait_until(lambda: look(replica)["done"])

    return change


def versions(replica: Any, batches: list[Any], clients: list[str] = CLIENTS) -> dict[str, str]:
    with replica.sdk() as sdk:
        return {client: sdk.predict(client, batches[0]).model.version for client in clients}


@pytest.mark.slow
def test_a_canary_takes_its_share_by_id_the_same_on_all_replicas_and_is_promoted_and_rolled_back(
    serve: Serve, batches: list[Any], rolled: Any, module: Any
) -> None:
    first, second = serve()
    versions(first, batches)
    assert load(first, "2").json() == {"name": "fashion", "version": "2"}
    assert set(versions(second, batches).values()) == {"1"}, "a version that is loaded answers nobody"

    places = {client: place_of(ClientScope(client), "2") for client in CLIENTS}
    taken: set[str] = set()
    for share in (0.3, 0.6):
        rolled(first, "1", "2", share)
        given = [versions(each, batches) for each in (first, second)]
        assert given[0] == given[1] == {c: "2" if places[c] < share else "1" for c in CLIENTS}
        assert taken <= {client for client, version in given[0].items() if version == "2"}
        taken = {client for client, version in given[0].items() if version == "2"}
    assert 0 < len(taken) < len(CLIENTS)
    shares = 'acclimate_version_share{model="fashion",version="%s"}'
    assert [first.metric(shares % version) for version in ("1", "2")] == [0.4, 0.6]
    answered = 'acclimate_version_rows_total{model="fashion",result="answered",version="2"}'
    assert first.metric(answered) > 0 < second.metric(answered)
    with module("tritonclient.http").InferenceServerClient(first.url.removeprefix("http://")) as client:
        config = client.get_model_config("fashion")
        assert config["version_policy"] == {"specific": {"versions": ["1", "2"]}}
        assert config["parameters"]["share_of_clients:2"] == {"string_value": "0.6"}
        assert {each["version"] for each in client.get_model_repository_index()} == {"1", "2"}

    rolled(first, "2")
    assert set(versions(second, batches).values()) == {"2"}
    assert second.http.get("/models").json()["models"][0]["version"] == "2"
    assert look(first)["previous"] == "1"
    rolled(second, "1")
    with first.sdk() as sdk:
        for client in CLIENTS:
            given = sdk.predict(client, batches[1])
            assert given.model.version == "1"
            assert given.state.version > 1, "its state is found again, and goes on"
            assert given.state.status in ("warm", "restored")


def test_a_repeat_is_answered_from_what_the_version_before_stored_or_computes_again(
    serve: Serve, batches: list[Any], rolled: Any
) -> None:
    first, second = serve()
    big = np.concatenate([batches[0]] * 12)
    given = {
        client: send(first, client, images, idempotency_key="k") for client, images in (("s", batches[0]), ("b", big))
    }
    first.redis.delete("acc:{default/b}:a", "acc:{default/b}:y")
    load(first, "2")
    rolled(first, "2")
    assert send(second, "s", batches[1]).model.version == "2"
    for client, images in (("s", batches[0]), ("b", big)):
        for replica in (first, second):
            again = send(replica, client, images, idempotency_key="k")
            assert (again.model.version, again.state.version) == ("1", 1)
            assert again.state.replayed in ("stored", "recomputed")
            assert np.allclose(again.probabilities, given[client].probabilities, atol=1e-6)


@pytest.mark.slow
def test_a_version_of_the_same_identity_goes_on_with_the_states(serve: Serve, batches: list[Any], rolled: Any) -> None:
    first, second = serve()
    alone = [send(first, "alone", images) for images in batches]
    given = [send(first, "moved", images) for images in batches[:2]]
    load(second, "1.1")
    rolled(second, "1.1")
    given += [send(second, "moved", images) for images in batches[2:]]
    assert [each.model.version for each in given] == ["1", "1", "1.1", "1.1", "1.1"]
    assert [each.state.version for each in given] == [1, 2, 3, 4, 5]
    for one, other in zip(given, alone, strict=True):
        assert np.allclose(one.probabilities, other.probabilities, atol=1e-6)


def test_a_version_that_fails_its_golden_batch_is_refused_and_nothing_is_changed(
    serve: Serve, batches: list[Any], assert_problem: Any
) -> None:
    (replica,) = serve(1)
    problem = assert_problem(load(replica, "3"), 422, "version_unfit")
    assert "fashion/3 is not loaded: " in problem["detail"]
    assert "the greatest difference is 3," in problem["detail"]
    assert look(replica)["number"] == 0
    assert replica.http.get("/v2/health/ready").status_code == 200
    assert send(replica, "cam", batches[0]).model.version == "1"
    refused = answer_by(replica, "3")
    assert "load it first" in assert_problem(refused, 404, "not_found")["detail"]
    assert_problem(answer_by(replica, ""), 404, "not_found")
    assert_problem(load(replica, "9"), 404, "not_found")
    assert_problem(replica.http.post("/v2/repository/models/other/load"), 404, "not_found")


@pytest.mark.slow
def test_no_client_needs_a_version_that_a_replica_cannot_load(
    serve: Serve, batches: list[Any], tmp_path_factory: Any, wait_until: Any, assert_problem: Any
) -> None:
    (first,) = serve(1)
    poor = make_store(tmp_path_factory.mktemp("poor"), "1")
    url = first.service.settings.redis_url
    (second,) = serve(1, model_store=poor, redis_url=url, replica="poor")
    assert load(first, "2").status_code == 200
    wait_until(lambda: any(each["failed"] for each in look(first)["replicas"]))
    problem = assert_problem(answer_by(first, "1", "2", 0.5), 409, "version_not_loaded")
    assert "fashion/2 is not on replica poor" in problem["detail"]
    assert "there is no fashion/2" in problem["detail"]
    ready = second.http.get("/v2/health/ready").json()
    assert ready["ready"] is True
    assert [each["task"] for each in ready["failing"]] == ["load of fashion/2"]
    lacking = second.http.post("/v2/repository/index").json()[-1]
    assert (lacking["version"], lacking["state"]) == ("2", "UNAVAILABLE")
    assert send(second, "cam", batches[0]).model.version == "1"

    make_store(poor, "2")
    assert load(second, "2").status_code == 200
    wait_until(lambda: look(first)["done"])
    assert answer_by(first, "1", "2", 0.5).status_code == 200
    assert second.http.get("/v2/health/ready").json()["failing"] == []


@pytest.mark.slow
def test_a_replica_that_lost_a_version_that_clients_need_is_not_ready_and_goes_on(
    serve: Serve, batches: list[Any], wait_until: Any
) -> None:
    (replica,) = serve(1)
    noted = Rollout("7", ("1", "7"), number=5)
    replica.redis.hset(replica.process.rollouts.key, "fashion", noted.to_json())
    wait_until(lambda: replica.http.get("/v2/health/ready").status_code == 503)
    wait_until(lambda: "there is no fashion/7" in replica.http.get("/v2/health/ready").json()["reason"])
    assert send(replica, "cam", batches[0]).model.version == "1"
    replica.redis.hset(replica.process.rollouts.key, "fashion", Rollout("1", ("1",), number=6).to_json())
    wait_until(lambda: replica.http.get("/v2/health/ready").status_code == 200)


def test_a_version_in_use_stays_and_one_that_goes_answers_its_last_requests(
    make_replica: Any, store: Path, gate: Any, pool: Any, batches: list[Any], assert_problem: Any, wait_until: Any
) -> None:
    gate.shut = False
    replica = make_replica(model="fashion/1", model_store=store, adapter="gated")
    load(replica, "2")
    assert answer_by(replica, "1", "2", 1.0).status_code == 200
    for query, says in (
        ("?version=1", "is the default"),
        ("?version=2", "answers 1 of the clients"),
        ("", "every version"),
    ):
        assert says in assert_problem(unload(replica, query), 409, "version_in_use")["detail"]
    assert_problem(unload(replica, "?version=8"), 404, "not_found")
    gate.shut = True
    last = pool.submit(send, replica, "cam", batches[0])
    gate.wait_for_a_step()
    going = pool.submit(unload, replica, "?version=2&force=true")
    wait_until(lambda: look(replica)["canary"] is None)
    assert not going.done()
    gate.open()
    assert last.result().model.version == "2"
    assert going.result().json() == {"name": "fashion", "versions": ["2"]}
    assert send(replica, "cam", batches[0]).model.version == "1"
    assert replica.http.get("/v2/models/fashion").json()["versions"] == ["1"]
    assert replica.http.get("/v2/models/fashion/versions/2").status_code == 404
    shares = [line for line in replica.http.get("/metrics").text.splitlines() if "version_share{" in line]
    assert shares == ['acclimate_version_share{model="fashion",version="1"} 1.0']


def shadowed(replica: Any, result: str) -> float:
    return replica.metric(f'acclimate_shadow_rows_total{{model="fashion",result="{result}",version="2"}}') or 0.0


def shadow_of(replica: Any, share: float = 1.0) -> None:
    load(replica, "2")
    wanted = {"default": "1", "shadow": {"version": "2", "share": share}}
    assert replica.http.put("/models/fashion/rollout", json=wanted).status_code == 200


def test_a_shadow_answers_nobody_and_what_it_would_have_answered_is_compared(
    serve: Serve, batches: list[Any], wait_until: Any
) -> None:
    (replica,) = serve(1, adapter="none")
    shadow_of(replica)
    assert look(replica)["shadow"] == {"version": "2", "share": 1.0}
    given = [send(replica, "cam", images, idempotency_key=str(number)) for number, images in enumerate(batches)]
    assert {each.model.version for each in given} == {"1"}
    rows = len(batches) * BATCH
    wait_until(lambda: shadowed(replica, "agreed") + shadowed(replica, "differed") == rows)
    bundle = Catalogue(replica.service.settings.model_store).load("fashion", "2")
    images = bundle.manifest.input.normalise(torch.from_numpy(np.concatenate(batches)), "cpu")
    would = [bundle.manifest.classes[i] for i in bundle.model.frozen(images).logits.argmax(1).tolist()]
    answered = [label for reply in given for label in reply.labels]
    assert shadowed(replica, "agreed") == sum(one == other for one, other in zip(answered, would, strict=True))
    assert send(replica, "cam", batches[0], idempotency_key="0").state.replayed == "stored"
    assert answer_by(replica, "1").json()["shadow"] is None
    send(replica, "cam", batches[0])
    assert unload(replica).json()["versions"] == ["2"]
    assert shadowed(replica, "agreed") + shadowed(replica, "differed") == rows, "neither a repeat nor what came after"


def test_a_shadow_that_is_behind_or_fails_delays_no_answer(
    serve: Serve, batches: list[Any], wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (replica,) = serve(1)
    shadow_of(replica)
    engine, late = replica.process.models["fashion"].versions["2"].engine, threading.Event()

    async def fail(*_: Any) -> Any:
        await asyncio.to_thread(late.wait)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(type(engine), "predict_frozen", fail)
    for _ in range(MOST_WAITING + 2):
        assert send(replica, "cam", batches[0]).model.version == "1"
    assert shadowed(replica, "left_out") == 2 * BATCH
    late.set()
    wait_until(lambda: shadowed(replica, "failed") == MOST_WAITING * BATCH)
    ready = replica.http.get("/v2/health/ready")
    assert ready.status_code == 200
    assert [each["task"] for each in ready.json()["failing"]] == ["shadow fashion/2"]


def test_a_restart_finds_what_was_rolled_out_and_versions_share_the_memory(
    serve: Serve, batches: list[Any], rolled: Any, wait_until: Any
) -> None:
    (first,) = serve(1, cache_bytes=64 * 2**20)
    whole = first.service.sessions._budget
    load(first, "2")
    assert first.service.sessions._budget == whole // 2
    rolled(first, "2")
    (later,) = serve(1, redis_url=first.service.settings.redis_url, replica="later")
    assert send(later, "cam", batches[0]).model.version == "2"
    assert look(later)["default"] == "2"
    assert {each["replica"].partition("~")[0] for each in look(later)["replicas"]} == {"r0", "later"}
    assert unload(later).json()["versions"] == ["1"]
    wait_until(lambda: first.service.sessions._budget == whole)


def test_a_version_that_a_path_names_answers_whatever_is_rolled_out(
    serve: Serve, batches: list[Any], module: Any
) -> None:
    (replica,) = serve(1)
    triton = module("tritonclient.http")
    with triton.InferenceServerClient(replica.url.removeprefix("http://")) as client:
        client.load_model("fashion", query_params={"version": "2"})
        images = triton.InferInput("images", list(batches[0].shape), "UINT8")
        images.set_data_from_numpy(batches[0])
        for version in ("1", "2"):
            for who in ({}, {"client_id": "cam"}):
                given = client.infer("fashion", [images], model_version=version, parameters=who).get_response()
                assert given["model_version"] == version
        assert {
            s["version"]: s["inference_count"] for s in client.get_inference_statistics("fashion")["model_stats"]
        } == {
            "1": 2 * BATCH,
            "2": 2 * BATCH,
        }
        client.unload_model("fashion")
        assert not any(each["version"] == "2" for each in client.get_model_repository_index())


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"default": "1", "canary": {"version": "", "share": 0.5}}, "canary is a version with its share"),
        ({}, "an object of these members"),
        ({"default": "1", "other": 1}, "an object of these members"),
        ({"default": "1", "canary": {"version": "2"}}, "canary is a version with its share"),
        ({"default": "1", "canary": {"version": "2", "share": 1.01}}, "a number from 0 to 1"),
        ({"default": "1", "canary": {"version": "2", "share": True}}, "a number from 0 to 1"),
        ({"default": "1", "canary": {"version": "1", "share": 0.5}}, "the default already"),
        ({"default": "1", "shadow": {"version": "1", "share": 0.5}}, "the default already, so it is no shadow"),
        ({"default": "1", "shadow": {"version": "2", "share": -1}}, "a number from 0 to 1"),
        (
            {"default": "1", "canary": {"version": "2", "share": 0.5}, "shadow": {"version": "2", "share": 0.5}},
            "the canary, so it is no shadow",
        ),
    ],
)
def test_what_is_no_rollout_is_refused(wanted: Any, says: str, replica: Any, assert_problem: Any) -> None:
    reply = replica.http.put("/models/fashion-cnn/rollout", json=wanted)
    assert says in assert_problem(reply, 422, "invalid_request")["detail"]


@pytest.mark.slow
def test_the_commands_do_it_all(serve: Serve, batches: list[Any], capsys: Any) -> None:
    first, second = serve()

    def run(*words: str, status: int = 0) -> str:
        assert main(["models", *words, "--url", first.url]) == status
        told = capsys.readouterr()
        return str(told.err if status else told.out)

    assert run("load", "fashion/2") == "fashion/2: loaded on all replicas\n"
    assert "fashion/2: answers 0 % of the clients (shadow of 20 % of the batches)" in run(
        "shadow", "fashion/2", "--share", "0.2"
    )
    assert "shadow" not in run("shadow", "fashion/2", "--share", "0")
    assert "fashion/2: answers 25 % of the clients (canary)" in run("canary", "fashion/2", "--share", "0.25")
    assert "answers 0.25 of the clients" in run("unload", "fashion/2", status=1)
    assert "fashion/2: answers 100 % of the clients (default)" in run("promote", "fashion")
    assert send(second, "cam", batches[0]).model.version == "2"
    assert "fashion/1: answers 100 % of the clients (default)" in run("rollback", "fashion")
    assert send(second, "cam", batches[0]).model.version == "1"
    assert "; follows yet" not in run("rollout", "fashion")
    assert json.loads(run("rollout", "fashion", "--json"))["default"] == "1"
    assert run("unload", "fashion/2") == "fashion/2: unloaded\n"
    assert "has no canary and no default before" in run("rollback", "fashion", status=2)
    assert "the greatest difference is 3," in run("canary", "fashion/3", "--share", "0.1", status=1)


@pytest.mark.slow
def test_the_how_to_does_what_it_says(serve: Serve, batches: list[Any], capsys: Any) -> None:
    first, second = serve()
    page = (ROOT / "docs/how-to-roll-out.md").read_text()
    commands = [line for block in re.findall("```console\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert len(commands) == 7
    for command in commands:
        _, *words = command.replace("pets", "fashion").split()
        assert main([*words, "--url", first.url]) == 0, capsys.readouterr().err
    assert send(second, "cam", batches[0]).model.version == "2"


def test_the_turn_of_a_client_comes_once_and_clients_are_spread_evenly() -> None:
    places = np.sort([place_of(ClientScope(f"c{number}"), "2") for number in range(2000)])
    assert np.abs(places - np.arange(2000) / 2000).max() < 0.05
    assert place_of(ClientScope("c1"), "2") != place_of(ClientScope("c1"), "3")
