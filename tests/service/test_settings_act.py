"""Every setting acts from the first request of a fresh replica, and again after a restart on what is stored."""

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import uvloop

from acclimate_service.service import open_service
from acclimate_service.settings import Settings
from acclimate_service.state import always
from acclimate_service.state.errors import StoreUnfit
from acclimate_service.trials.challengers import scope_of

TESTS = Path(__file__).parents[1]
BUNDLES = TESTS.parent / "model_store" / "bundles"
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
OFF = {"adapter": "atp", "journal": False, "import_": False, "state_budget": 0.25, "guard": "off", "secret": "s"}
ELSEWHERE = {
    "redis_url": "service/clients/test_hand_over.py::test_an_idle_replica_hands_its_client_over_at_once",
    "model_store": "service/clients/test_adapters.py::test_",
    "allowed_imports": "model_store/test_create.py::test_",
    "device": "gpu/test_gpu_graphs.py::test_",
    "device_cache_bytes": "service/compute/test_device_cache.py::"
    "test_clients_that_take_turns_are_moved_and_answer_as_if_they_were_not",
    "host": "service/test_settings.py::test_a_wrong_setting_is_one_clear_line",
    "port": "e2e/test_process.py::test_sigint_ends_the_service_although_connections_are_open",
    "max_clients": "service/clients/test_admission.py::test_a_tenant_has_so_many_clients_and_a_deleted_one_makes_room",
    "max_waiting": "service/clients/test_admission.py::test_a_client_that_floods_the_service_does_not_shut_others_out",
    "max_waiting_rows": "service/clients/test_sharing.py::test_",
    "max_held_bytes": "service/http/test_limits.py::"
    "test_unfinished_uploads_count_and_those_that_find_no_room_are_told_so",
    "adapters": "service/clients/test_costly_steps.py::test_adapters_that_are_not_offered_are_neither_listed_nor_given",
    "max_step_ms": "service/clients/test_costly_steps.py::"
    "test_a_batch_of_too_many_images_is_refused_and_one_of_fewer_is_answered",
    "request_timeout_ms": "service/compute/test_stuck.py::"
    "test_a_replica_whose_device_is_stuck_is_not_ready_until_it_goes_on",
    "strict_replay": "service/compute/test_runtime.py::"
    "test_the_memory_layout_is_reported_and_the_same_on_all_replicas_under_strict_replay",
    "store_outage": "service/clients/test_outage.py::"
    "test_by_the_policy_frozen_the_global_model_answers_meanwhile_and_no_state_is_lost",
    "influence": "service/clients/test_influence.py::"
    "test_a_large_batch_counts_for_as_many_mean_batches_as_the_operator_allows",
    "keep_snapshots": "service/clients/test_rollback.py::"
    "test_nothing_is_kept_where_the_operator_says_so_nor_of_what_candidates_learn",
    "guard_clients": "service/trials/test_promotion.py::"
    "test_a_better_candidate_is_what_new_clients_begin_with_and_labelled_ones_go_on_with",
    "auto_switch": "service/trials/test_promotion.py::"
    "test_a_better_candidate_is_what_new_clients_begin_with_and_labelled_ones_go_on_with",
    "drain_lead_s": "e2e/test_drain.py::"
    "test_sigterm_is_followed_by_a_time_in_which_batches_are_answered_and_balancers_are_told",
    "drain_budget_s": "service/clients/test_sessions.py::"
    "test_the_end_has_one_budget_for_the_states_of_clients_and_of_candidates",
    "round_interval_s": "service/federated/test_cohort.py::test_replicas_run_rounds_by_themselves_one_per_interval",
    "round_clients": "service/federated/test_cohort.py::test_a_round_takes_no_more_clients_than_it_may",
}
"""Settings whose test needs more than one request of one replica."""
HERE = {*TIGHT, *JOURNAL, *OFF, "redis_override", "appendfsync", "redis_max_bytes", "data_dir"}


def test_every_setting_has_a_test_that_there_is():
    assert HERE | set(ELSEWHERE) == set(Settings.model_fields)
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}" in (TESTS / file).read_text(), place


def send(replica, client, images, **headers):
    shape = ",".join(map(str, images.shape))
    headers = {"Content-Type": "application/octet-stream", "X-Tensor-Shape": shape, **headers}
    return replica.http.post(f"/clients/{client}/predict", content=images.tobytes(), headers=headers)


@pytest.fixture(scope="module", params=["fresh", "after a restart"])
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
    deadline = time.monotonic() + 10
    while replica.service.challengers._waiting and time.monotonic() < deadline:
        time.sleep(0.01)
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
    exact = sum(each.nbytes for each in off[0].service.sessions._sessions["first"].state.state.tensors.values())
    assert off[0].http.get("/clients/first").json()["state"]["bytes"] <= exact / 4 + 10_000


def test_replicas_to_wait(journal):
    assert journal[0].metric("acclimate_state_unreplicated") >= 1, "there is no replica, which is counted"


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


def test_secret(off):
    keyed = {"Idempotency-Key": "k"}
    send(off[0], "keyed", np.zeros((1, 28, 28), np.uint8), **keyed).raise_for_status()
    (marker,) = off[0].redis.hvals("acc:{default/keyed}:i")
    assert re.search(rb"[0-9a-f]{32}", marker)
    other = send(off[0], "keyed", np.ones((1, 28, 28), np.uint8), **keyed)
    assert other.json()["code"] == "key_reused"


def test_redis_override(make_replica):
    replica = make_replica()
    url = replica.service.settings.redis_url
    replica.redis.config_set("appendonly", "no")
    with pytest.raises(StoreUnfit):
        make_replica(redis_url=url)
    for _ in range(2):
        other = make_replica(redis_url=url, redis_override=True)
        assert send(other, "cam", np.zeros((1, 28, 28), np.uint8)).status_code == 200


def test_data_dir_appendfsync_and_memory_of_the_private_redis(tmp_path):
    wanted = {"appendfsync": "always", "redis_max_bytes": 16 * 2**20}
    settings = Settings(data_dir=tmp_path, model_store=BUNDLES, threads=1, **wanted)

    async def look():
        async with open_service(settings) as service:
            return [(await service.wire.read("CONFIG", "GET", name))[1] for name in ("appendfsync", "maxmemory")]

    def run():
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(look())

    with ThreadPoolExecutor(1) as thread:  # an event loop of its own, beside those of the replicas above
        for _ in ("fresh", "after a restart"):
            assert thread.submit(run).result(timeout=60) == [b"always", b"%d" % (16 * 2**20)]
            assert any(tmp_path.iterdir())
