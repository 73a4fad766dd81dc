"""Every setting acts from the first request of a fresh replica, and again after a restart on what is stored."""

import asyncio
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import uvloop
from safetensors.torch import load_file

from acclimate_adapters import State
from acclimate_service.guard.evidence import Counts
from acclimate_service.guard.pools import Share
from acclimate_service.replica import open_replica
from acclimate_service.settings import Settings
from acclimate_service.state import ClientScope, always
from acclimate_service.state.errors import StoreUnfit
from acclimate_service.trials.challengers import scope_of
from acclimate_store import BundleError, Catalogue, write_bundle
from acclimate_store.architectures import ShallowCNN, build
from acclimate_store.files import MODEL_FILE

TESTS = Path(__file__).parents[1]
BUNDLES = TESTS.parent / "model_store" / "bundles"
OWN_ARCHITECTURE = f"{ShallowCNN.__module__}:{ShallowCNN.__qualname__}"
STATE = {"Content-Type": "application/octet-stream"}
TIGHT = {
    "model": "fashion-cnn/1",
    "adapter": "atp",
    "adapter_options": {"mode": "batch"},
    "tenant": "acme",
    "guard": "frozen",
    "guard_alpha": 0.2,
    "candidates": ("none",),
    "candidate_share": 1.0,
    "threads": 1,
    "runtime": "torch",
    "max_body_bytes": 200_000,
    "max_state_bytes": 1000,
    "max_images": 30,
    "max_pixels": 900,
    "allowed_hosts": ("models.example", "127.0.0.1"),
    "cors_origins": ("https://app.example",),
    "state_ttl_s": 3600,
    "cache_bytes": 8_000_000,
}
JOURNAL = {"adapter": "fedcal", "inline_max": 100, "replica": "replica-7", "replicas_to_wait": 1, "guard": "adapt"}
OFF = {
    "adapter": "atp",
    "adapters": ("atp", "memo"),
    "max_step_ms": 2000,
    "keep_snapshots": 0,
    "timeline": False,
    "journal": False,
    "import_": False,
    "state_budget": 0.25,
    "guard": "off",
    "secret": "s",
}
BOUNDS = {
    "adapter": "fedcal",
    "max_waiting": 2,
    "max_waiting_rows": 4,
    "max_held_bytes": 100_000,
    "max_clients": 3,
    "guard": "off",
}
STRICT = {
    "adapter": "fedcal",
    "inline_max": 1,
    "strict_replay": True,
    "request_timeout_ms": 2000,
    "store_outage": "frozen",
    "drain_budget_s": 0.5,
    "guard": "off",
}
LABELS = {
    "adapter": "fedcal",
    "influence": 1.0,
    "guard_clients": 1,
    "candidates": ("em",),
    "ask_budget": 0.5,
    "keep_images_bytes": 2 * 28 * 28,
}
ROUNDS = {
    "model": "own",
    "adapter": "fed_ade",
    "adapter_options": {"layers": "all", "eta_min": 1e-6, "eta_max": 1e-5, "epochs": 1},
    "round_interval_s": 1,
    "round_clients": 2,
    "guard": "off",
}
ELSEWHERE = {
    "device": "gpu/test_gpu_graphs.py::test_",
    "device_cache_bytes": "service/compute/test_device_cache.py::"
    "test_clients_that_take_turns_are_moved_and_answer_as_if_they_were_not",
    "host": "service/test_settings.py::test_a_wrong_setting_is_one_clear_line",
    "webhook_url": "service/clients/test_webhook.py::test_a_client_that_turns_harmful_is_told_once_and_signed",
    "root_path": "service/http/test_root_path.py::test_it_is_the_same_whether_or_not_the_proxy_takes_the_path_off",
    "log_format": "service/test_logs.py::test_the_log_is_written_as_the_settings_say",
    "log_level": "service/test_logs.py::test_the_log_is_written_as_the_settings_say",
    "keys_file": "service/http/test_access.py::test_keys_are_changed_without_a_restart",
    "allow_anonymous": "service/http/test_access.py::"
    "test_nobody_is_let_in_from_outside_without_keys_unless_the_operator_says_so",
    "tenant_bytes": "service/http/test_tenants.py::test_each_tenant_has_its_own_bytes",
    "tenant_rows_per_minute": "service/http/test_tenants.py::test_each_tenant_has_its_own_rate_of_images",
    "models": "service/test_several_models.py::test_models_are_listed_the_default_one_first",
    "port": "e2e/test_process.py::"
    "test_what_is_served_is_said_at_the_start_and_sigint_ends_it_although_connections_are_open",
    "max_queue_ms": "e2e/test_overload.py::test_at_four_times_capacity_accepted_batches_wait_about_the_bound",
    "drain_lead_s": "e2e/test_drain.py::"
    "test_sigterm_is_followed_by_a_time_in_which_batches_are_answered_and_balancers_are_told",
}
"""Settings that need a process of their own, or a GPU; nothing that is stored has to do with them."""
PROFILES = (TIGHT, JOURNAL, OFF, BOUNDS, STRICT, LABELS, ROUNDS)
ALONE = {"redis_url", "redis_override", "appendfsync", "redis_max_bytes", "data_dir", "model_store", "allowed_imports"}
HERE = ALONE.union(*PROFILES)


def test_every_setting_has_a_test_that_there_is():
    assert HERE | set(ELSEWHERE) == set(Settings.model_fields)
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}" in (TESTS / file).read_text(), place


@pytest.fixture(scope="module")
def noise():
    """Blocks of 4 x 4 pixels: what tells nothing at all is not always learned from."""
    return np.random.default_rng(0).integers(0, 256, (200, 7, 7), np.uint8).repeat(4, 1).repeat(4, 2)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def send(replica, client, images, **headers):
    shape = ",".join(map(str, images.shape))
    headers = {"Content-Type": "application/octet-stream", "X-Tensor-Shape": shape, **headers}
    return replica.http.post(f"/clients/{client}/predict", content=images.tobytes(), headers=headers)


@pytest.fixture(scope="module", params=["fresh", pytest.param("after a restart", marks=pytest.mark.slow)])
def twice(request, run_service, tmp_path_factory):
    """Run a service on an empty Redis, or on what one like it has left there, and give its first reply too."""
    image, opened = np.zeros((1, 28, 28), np.uint8), []

    def run(**settings):
        data_dir = tmp_path_factory.mktemp("data")
        if request.param == "after a restart":
            with run_service(data_dir=data_dir, **settings) as before:
                assert send(before, "first", image).status_code == 200
        running = run_service(data_dir=data_dir, **settings)
        opened.append(running)
        replica = running.__enter__()
        return replica, send(replica, "first", image).json()

    yield run
    for running in opened:
        running.__exit__(None, None, None)


@pytest.fixture(scope="module")
def tight(twice):
    return twice(**TIGHT)


@pytest.fixture(scope="module")
def journal(twice):
    return twice(**JOURNAL)


@pytest.fixture(scope="module")
def off(twice):
    return twice(**OFF)


@pytest.fixture(scope="module")
def bounds(twice):
    return twice(**BOUNDS)


@pytest.fixture(scope="module")
def strict(twice):
    return twice(**STRICT)


@pytest.fixture(scope="module")
def labels(twice):
    return twice(**LABELS)


@pytest.fixture(scope="module")
def rounds(twice, own_store):
    return twice(**ROUNDS, model_store=own_store, allowed_imports=(OWN_ARCHITECTURE,))


@pytest.fixture(scope="module")
def own_store(anchored_store, tmp_path_factory):
    """A store with a network that is imported from where its operator allows it."""
    bundle = Catalogue(anchored_store).load("fashion-cnn")
    manifest = bundle.manifest.model_copy(update={"name": "own", "architecture": OWN_ARCHITECTURE})
    net = build(bundle.manifest.architecture, bundle.manifest.architecture_options)
    net.load_state_dict(load_file(anchored_store / bundle.manifest.key / MODEL_FILE))
    store = tmp_path_factory.mktemp("own")
    write_bundle(store, manifest, net, bundle.model.source, allowed_imports=(OWN_ARCHITECTURE,))
    return store


def test_model(tight):
    assert tight[1]["model"] == {"name": "fashion-cnn", "version": "1"}


def test_adapter_and_its_options(tight):
    found = tight[0].http.get("/clients/first").json()
    assert (found["adapter"], found["hyperparameters"]) == ("atp", {"mode": "batch"})


def test_tenant(tight):
    keys = {key.partition(b"/")[0] for key in tight[0].redis.keys("*")}
    assert keys == {b"acc:{acme"}


def test_replica(journal):
    send(journal[0], "owned", np.zeros((1, 28, 28), np.uint8)).raise_for_status()  # whose lease ends in seconds
    assert journal[0].http.get("/clients/owned").json()["state"]["owner"] == "replica-7"


def test_guard(tight):
    assert tight[1]["guard"]["answering"] == "frozen"
    assert tight[1]["guard"]["because"] == "policy"
    assert tight[1]["state"]["status"] == "guarded"


def test_guard_alpha(tight):
    reply = send(tight[0], "labelled", np.zeros((2, 28, 28), np.uint8)).json()
    rows = [{"request_id": reply["request_id"], "row": 0, "label": reply["predictions"][0]["index"]}]
    tight[0].http.post("/clients/labelled/feedback", json={"rows": rows}).raise_for_status()
    accuracy = tight[0].http.get("/clients/labelled").json()["guard"]["frozen"]
    assert 0.05 < accuracy["low"] < 0.2, "one right row is wider at a smaller alpha"


def test_candidates_and_their_share(tight):
    replica = tight[0]
    until(lambda: not replica.service.challengers._waiting)
    (name,) = replica.service.challengers.configurations
    scope = scope_of(replica.service.bundle.model.content_hash, name)
    assert replica.redis.keys(f"acc:{{acme/first}}:{scope}:*")


def test_threads(tight):
    assert tight[0].run(tight[0].service.worker.run(torch.get_num_threads, always)) == 1


def test_runtime(tight):
    assert tight[0].http.get("/models").json()["models"][0]["runtime"].startswith("torch")


def test_cache_bytes(tight):
    service = tight[0].service
    assert sum(each._budget for each in (service.sessions, *service.challengers.sessions)) == 8_000_000


def test_max_images(tight):
    reply = send(tight[0], "many", np.zeros((31, 28, 28), np.uint8))
    assert (reply.status_code, reply.json()["code"]) == (413, "too_many_images")


def test_max_pixels(tight):
    image = (TESTS.parent / "docs/images/boot.png").read_bytes()
    assert send(tight[0], "small", np.zeros((1, 28, 28), np.uint8)).status_code == 200
    headers = {"Content-Type": "image/png"}
    reply = tight[0].http.post("/clients/small/predict", content=enlarged(image), headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (422, "too_many_pixels")


def enlarged(png):
    from io import BytesIO

    from PIL import Image

    file = BytesIO()
    Image.open(BytesIO(png)).resize((31, 31)).save(file, "PNG")
    return file.getvalue()


def test_max_body_bytes(tight):
    reply = tight[0].http.post("/clients/large/predict", content=bytes(200_001), headers=STATE)
    assert (reply.status_code, reply.json()["code"]) == (413, "body_too_large")


def test_max_state_bytes(tight):
    reply = tight[0].http.put("/clients/first/state", content=bytes(1001), headers=STATE)
    assert (reply.status_code, reply.json()["code"]) == (413, "body_too_large")


def test_allowed_hosts(tight):
    replies = [tight[0].http.get("/models", headers={"Host": host}) for host in ("models.example", "evil.example")]
    assert [reply.status_code < 400 for reply in replies] == [True, False]


def test_cors_origins(tight):
    image = np.zeros((1, 28, 28), np.uint8)
    replies = [send(tight[0], "page", image, Origin=f"https://{name}.example") for name in ("app", "evil")]
    assert [reply.status_code < 400 for reply in replies] == [True, False]
    assert replies[0].headers["access-control-allow-origin"] == "https://app.example"


def test_state_ttl_s(tight):
    (head,) = [key for key in tight[0].redis.keys("acc:{acme/first}:*:h") if own(tight[0], key)]
    assert 0 < tight[0].redis.pttl(head) <= 3600 * 1000


def own(replica, key):
    return replica.service.bundle.model.content_hash.encode() in key


def test_inline_max(journal):
    assert journal[0].metric('acclimate_state_commits_total{result="appended",way="delta"}') >= 1
    assert journal[0].metric('acclimate_state_commits_total{result="committed",way="full"}') == 0


def test_state_budget(off):
    held = off[0].service.sessions._sessions["first"].memory.held
    exact = sum(each.nbytes for each in held.state.state.tensors.values())
    assert off[0].http.get("/clients/first").json()["state"]["base_bytes"] <= exact / 4 + 10_000


def test_replicas_to_wait(journal):
    assert journal[0].metric("acclimate_state_unreplicated_total") >= 1, "there is no replica, which is counted"


def test_guard_off(off):
    assert "guard" not in off[1]
    assert off[0].http.get("/models/fashion-cnn/adapters").json()["code"] == "guard_off"


def test_import(off):
    state = off[0].http.get("/clients/first/state").content
    before = off[0].keys("first")
    reply = off[0].http.put("/clients/first/state", content=state, headers=STATE)
    assert (reply.status_code, reply.json()["code"], reply.json()["state_committed"]) == (403, "import_off", False)
    assert off[0].keys("first") == before


def test_journal(off):
    assert off[0].metric('acclimate_state_commits_total{result="committed",way="full"}') >= 1
    assert not off[0].redis.keys("acc:*:j"), "no input is kept"


def test_adapters(off):
    replies = [off[0].http.put("/clients/choosing", json={"adapter": name}) for name in ("memo", "em")]
    assert [reply.status_code for reply in replies] == [200, 403]


def test_max_step_ms(off, noise):
    costly = {"adapter": "memo", "hyperparameters": {"views": 64, "steps": 10}}
    reply = off[0].http.put("/clients/slow", json=costly)
    if reply.is_success:  # a slow machine cannot afford one image of it
        reply = send(off[0], "slow", noise)
    assert reply.json()["code"] == "step_too_costly"


def test_keep_snapshots(off, noise):
    for count in (2, 3, 4):
        send(off[0], "kept", noise[:count]).raise_for_status()
    assert off[0].http.get("/clients/kept").json()["state"]["kept"] == []


def test_timeline(off, noise):
    send(off[0], "unnoted", noise).raise_for_status()
    assert off[0].http.get("/clients/unnoted/timeline").json()["code"] == "timeline_off"
    assert not off[0].redis.keys("acc:{default/unnoted}:*:t")


def test_keep_images_bytes(labels, noise):
    send(labels[0], "pictured", noise[:5]).raise_for_status()
    assert len(labels[0].http.get("/clients/pictured/images").json()["images"]) == 2


def test_secret(off):
    keyed = {"Idempotency-Key": "k"}
    send(off[0], "keyed", np.zeros((1, 28, 28), np.uint8), **keyed).raise_for_status()
    (marker,) = off[0].redis.hvals("acc:{default/keyed}:i")
    assert re.search(rb"[0-9a-f]{32}", marker)
    other = send(off[0], "keyed", np.ones((1, 28, 28), np.uint8), **keyed)
    assert other.json()["code"] == "key_reused"


def test_max_waiting(bounds, pool, shade):
    replica = bounds[0]
    batches = replica.service.admission.batches
    with replica.at_work("first", replica.service.sessions):
        waiting = [pool.submit(send, replica, "first", shade(value)) for value in range(2)]
        until(lambda: batches.taken == 2)
        reply = send(replica, "other", shade(3))
    assert (reply.status_code, "2 batches are waiting" in reply.json()["detail"]) == (429, True)
    assert [each.result().status_code for each in waiting] == [200, 200]


def test_max_waiting_rows(bounds, pool, noise):
    replica = bounds[0]
    with replica.at_work("first", replica.service.sessions):
        waiting = pool.submit(send, replica, "first", noise[:3])
        until(lambda: replica.service.admission.rows.taken == 3)
        reply = send(replica, "other", noise[:2])
    assert (reply.status_code, "3 images are waiting" in reply.json()["detail"]) == (429, True)
    assert waiting.result().status_code == 200


def test_max_held_bytes(bounds, pool, noise):
    replica = bounds[0]
    with replica.at_work("first", replica.service.sessions):
        waiting = pool.submit(send, replica, "first", noise[:1])
        until(lambda: replica.service.admission.rows.taken == 1)
        reply = send(replica, "other", noise[:128])
    assert (reply.status_code, "bytes are waiting" in reply.json()["detail"]) == (429, True)
    assert waiting.result().status_code == 200


def test_influence(labels, noise):
    for count in (20, 20, 200):
        send(labels[0], "loud", noise[:count]).raise_for_status()
    state = State.from_bytes(labels[0].http.get("/clients/loud/state").content)
    assert int(state.tensors["rows"]) == 60, "200 rows count as much as 20"


def test_max_clients(bounds, noise):
    replica = bounds[0]
    replies = [send(replica, f"new-{number}", noise[:1]) for number in range(3)]
    assert (replies[-1].status_code, replies[-1].json()["code"]) == (507, "store_full")
    assert len(replica.redis.keys("acc:*:h")) == 3
    assert send(replica, "first", noise[:1]).status_code == 200


def test_request_timeout_ms(strict, pool, noise):
    """For those that name no deadline, and for those that name a longer one."""
    replica, longer = strict[0], {"X-Request-Timeout-Ms": "600000"}
    with replica.at_work("first", replica.service.sessions):
        waiting = [pool.submit(send, replica, "first", noise[:1], **headers) for headers in ({}, longer)]
        replies = [each.result() for each in waiting]
    assert [(reply.status_code, reply.json()["code"]) for reply in replies] == [(504, "deadline_exceeded")] * 2


def test_strict_replay(strict, noise, monkeypatch):
    replica = strict[0]
    send(replica, "moved", noise[:1]).raise_for_status()
    replica.loop.call_soon_threadsafe(replica.service.sessions.drop, "moved")
    monkeypatch.setattr(replica.service.engine._machine, "engine", "of another version")
    assert send(replica, "moved", noise[:1]).json()["code"] == "state_unreadable"
    layouts = [model["layout"] for model in replica.http.get("/models").json()["models"]]
    assert layouts == ["contiguous"], "none was chosen by trying"


def test_store_outage(strict, noise):
    replica = strict[0]
    redis = replica.redis.info()["process_id"]
    os.kill(redis, signal.SIGSTOP)
    try:
        reply = send(replica, "first", noise[:1])
    finally:
        os.kill(redis, signal.SIGCONT)
    assert (reply.status_code, reply.json()["state"]["status"]) == (200, "frozen")


def test_drain_budget_s(run_service, tmp_path, noise):
    for _ in ("fresh", "after a restart"):
        with run_service(data_dir=tmp_path, **STRICT) as replica:
            send(replica, "first", noise[:1]).raise_for_status()
            replica.service.sessions._evicting = asyncio.Semaphore(0)  # it cannot be written away
            began = time.monotonic()
        assert time.monotonic() - began < Settings().drain_budget_s / 2


def test_guard_clients(labels, noise):
    replica = labels[0]
    default = replica.service.configurations.default
    tell(replica, replica.service.fleet, default, Counts(losses=12, labelled=12, frozen_right=12))
    guard = send(replica, "first", noise[:1]).json()["guard"]
    assert (guard["answering"], guard["because"]) == ("frozen", "fleet_harmful")


def test_ask_budget(labels, stream):
    asked = [send(labels[0], "asked", images[:, 0]).json().get("ask", []) for images in stream(0, 8)]
    assert sum(map(len, asked)) >= 8, "a half of 160 rows if so many differ; a hundredth by default"


def tell(replica, fleet, configuration, counts):
    """What one client's labels say, as this replica will hear it."""
    share = Share("a" * 16, 1, "b" * 16, counts)
    replica.run(fleet._pools.tell(ClientScope("teller"), configuration, share))
    replica.run(fleet.pooled())


def test_model_store_and_allowed_imports(rounds, make_replica, own_store):
    (model,) = rounds[0].http.get("/models").json()["models"]
    assert (model["name"], model["architecture"]) == ("own", OWN_ARCHITECTURE)
    with pytest.raises(BundleError, match="if you trust it and say so"):
        make_replica(model_store=own_store, model="own")


def test_rounds_by_themselves_and_their_clients(rounds, stream):
    replica = rounds[0]
    replica.http.delete("/clients/first").raise_for_status()  # one flat image is not enough for a round
    clients = [f"member-{number}" for number in range(4)]
    for number, name in enumerate(clients):
        send(replica, name, stream(number, 1)[0][:, 0]).raise_for_status()
    before = version_of_the_cohort(replica)
    until(lambda: version_of_the_cohort(replica) >= before + 2)
    changes = sum(replica.http.get(f"/clients/{name}").json()["state"]["version"] - 1 for name in clients)
    assert 2 <= changes <= 2 * (version_of_the_cohort(replica) + 1 - before), "two of them in each round"


def version_of_the_cohort(replica):
    return replica.run(replica.service.rounds._cohorts.load()).version


def test_redis_url_and_override(make_replica, noise):
    replica = make_replica()
    url = replica.service.settings.redis_url
    replica.redis.config_set("appendonly", "no")
    with pytest.raises(StoreUnfit):
        make_replica(redis_url=url)
    for version in (1, 2):
        other = make_replica(redis_url=url, redis_override=True)
        assert send(other, "cam", noise[:1]).json()["state"]["version"] == version


def test_data_dir_appendfsync_and_memory_of_the_private_redis(tmp_path):
    wanted = {"appendfsync": "always", "redis_max_bytes": 16 * 2**20}
    settings = Settings(data_dir=tmp_path, model_store=BUNDLES, threads=1, **wanted)

    async def look():
        async with open_replica(settings) as replica:
            service = replica.service
            return [(await service.wire.read("CONFIG", "GET", name))[1] for name in ("appendfsync", "maxmemory")]

    def run():
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(look())

    with ThreadPoolExecutor(1) as thread:  # an event loop of its own, beside those of the replicas above
        for _ in ("fresh", "after a restart"):
            assert thread.submit(run).result(timeout=60) == [b"always", b"%d" % (16 * 2**20)]
            assert any(tmp_path.iterdir())
