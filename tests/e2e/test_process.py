"""Start and end of the process."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from redis import Redis

from acclimate_client import Client

BUNDLES = Path(__file__).parents[2] / "model_store/bundles"
NO_SECRET = "ACCLIMATE_SECRET is empty"


def redis_of(tmp_path):
    with Redis(unix_socket_path=str(tmp_path / "data" / "redis.sock")) as redis:
        return int(redis.info("server")["process_id"])


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_sigterm_ends_the_service_with_status_0_after_the_batch_at_hand_and_its_redis_too(serve, stream, tmp_path):
    service = serve()
    redis = redis_of(tmp_path)
    one, two = stream(0, 2, size=200)
    with ThreadPoolExecutor(1) as pool, Client(service.url, max_retries=0) as client:
        client.predict("cam", one)
        call = pool.submit(client.predict, "cam", two)
        while "acclimate_waiting 1.0" not in httpx.get(f"{service.url}/metrics").text:
            assert not call.done(), "the batch was too quick to be interrupted"
        service.signal(signal.SIGTERM)
        assert call.result().state.version == 2
    assert service.wait() == 0
    assert not is_running(redis)
    assert service.log.read_text() == ""
    with Client(serve().url) as client:
        assert client.get("cam").state.version == 2


@pytest.mark.slow
def test_a_data_directory_is_not_shared_and_a_killed_service_leaves_no_redis_behind(serve, tmp_path):
    service = serve()
    redis = redis_of(tmp_path)
    with pytest.raises(pytest.fail.Exception, match="another service runs on"):
        serve()
    service.kill()
    deadline = time.monotonic() + 60
    while is_running(redis):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_rates_that_harmed_held_out_clients_are_no_default_and_the_start_says_why(serve, stream, tmp_path):
    folder = tmp_path / "store/fashion-cnn/1"
    shutil.copytree(BUNDLES / "fashion-cnn/1", folder)
    told = json.loads((folder / "manifest.json").read_text())
    told["evidence"] |= {"gain": -0.028, "low": -0.041, "high": -0.015, "worst": -0.115, "harmed": 0.4}
    (folder / "manifest.json").write_text(json.dumps(told))
    service = serve(model_store=tmp_path / "store", secret="salt")
    with Client(service.url) as client:
        assert client.predict("cam", *stream(0, 1)).adapter == "consensus"
    service.signal(signal.SIGTERM)
    assert service.wait() == 0
    said = service.output
    assert NO_SECRET not in said
    assert (
        "acclimate: default adapter: consensus, because: no_labels; it hardly harms anybody, and of atp its gain of "
        "-2.8 points may be none (-4.1 to -1.5); run `acclimate evaluate fashion-cnn --write`\n"
    ) in said


def test_what_is_served_is_said_at_the_start_and_sigint_ends_it_although_connections_are_open(serve, tmp_path):
    service = serve(secret="")
    assert service.announcement == (
        f"acclimate: serving fashion-cnn/1 at {service.url}, state in {tmp_path / 'data'} (durability everysec)\n"
    )
    assert service.adapters.startswith("acclimate: adapters atp, ")
    assert service.adapters.endswith("; not served: fed_ade lacks anchors\n")
    assert not has_loaded_torchvision(service), "no image has to be resized"
    address = urlsplit(service.url)
    with socket.create_connection((address.hostname, address.port)), httpx.Client(base_url=service.url) as client:
        client.get("/v2/health/live")
        service.signal(signal.SIGINT)
        assert service.wait() == 0
    assert NO_SECRET in service.output


def test_a_wrong_setting_ends_the_process_with_status_2_and_one_line():
    done = subprocess.run(
        [Path(sys.executable).with_name("acclimate"), "serve"],
        env={**os.environ, "ACCLIMATE_ADAPTER": "nope"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("acclimate: ACCLIMATE_ADAPTER, ACCLIMATE_ADAPTER_OPTIONS: there is no adapter 'nope'")
    assert done.stderr.count("\n") == 1


def only_child(pid):
    return int((Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or [0])[0])


def handles_sigterm(pid):
    """Until then the kernel lets no signal reach the first process of a container."""
    (handled,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return int(handled.split()[1], 16) >> (signal.SIGTERM - 1) & 1


def until(condition):
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("wait_s", [0, 1.5, 4.0])
def test_sigterm_while_it_starts_ends_it_though_it_is_the_first_process_of_a_container(tmp_path, wait_s):
    command = [Path(sys.executable).with_name("acclimate"), "serve"]
    inside = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*inside, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespaces of processes may be made here")
    variables = {"ACCLIMATE_DATA_DIR": str(tmp_path / "data"), "ACCLIMATE_PORT": "0"}
    with subprocess.Popen([*inside, *command], env={**os.environ, **variables}, stdout=subprocess.PIPE) as process:
        try:
            first = until(lambda: only_child(process.pid))
            until(lambda: handles_sigterm(first))
            time.sleep(wait_s)
            os.kill(first, signal.SIGTERM)
            assert process.wait(timeout=60) in (128 + signal.SIGTERM, 0)  # 0: it was quicker
        finally:
            process.kill()  # which no failure shall wait for


def has_loaded_torchvision(service):
    """It costs a third of the time of a start and 200 MB, by the compiler of torch that it brings."""
    return "torchvision" in Path(f"/proc/{service.pid}/maps").read_text()


def test_what_only_some_models_need_is_loaded_before_they_answer(serve, tmp_path):
    store = tmp_path / "store"
    bundle = shutil.copytree(BUNDLES / "fashion-cnn/1", store / "fashion-cnn" / "1")
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["input"]["resize"] = {"size": [28, 28], "interpolation": "bilinear", "antialias": True, "crop": None}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    assert has_loaded_torchvision(serve(model_store=store))
