"""Every route with every kind of key: who is let in, and what is said to the others."""

import logging
import socket
from types import SimpleNamespace

import httpx
import pytest
from fastapi import APIRouter

from acclimate_client import Client
from acclimate_client.errors import ScopeMissingError, UnauthorizedError
from acclimate_service.http.access import NEEDS, KeyedRoute, need_of
from acclimate_service.keys import ANY_KEY, ANYBODY, SCOPES, create
from acclimate_service.serving import _require_keys
from acclimate_service.settings import SettingsError, read_settings

PAGES = {"/docs", "/openapi.json"}
ROUTES = [name.split() for name in NEEDS]


@pytest.fixture(scope="module")
def kept(run_service, tmp_path_factory):
    """A service, its file of keys, and a key of each scope."""
    folder = tmp_path_factory.mktemp("keys")
    made = {scope: create("acme", [scope]) for scope in SCOPES}
    file = folder / "keys"
    file.write_text("\n".join(line for _, line in made.values()))
    with run_service(keys_file=file, data_dir=folder / "data") as replica:
        yield SimpleNamespace(
            replica=replica, http=replica.http, file=file, keys={scope: key for scope, (key, _) in made.items()}
        )


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def at(path):
    return path.format(client_id="cam-7", model="fashion-cnn", version="1")


def routes_of(router):
    for route in router.routes:
        if hasattr(route, "original_router"):
            yield from routes_of(route.original_router)
        else:
            yield route


def test_the_table_has_every_route_that_there_is_and_no_other(kept):
    described = kept.http.get("/openapi.json").json()["paths"]
    there = {
        f"{method.upper()} {path.replace('/models/fashion-cnn/', '/models/{model}/')}"
        for path, operations in described.items()
        for method in operations
    }
    assert {name.replace("/models/{model}/clients", "/clients") for name in there} == NEEDS.keys()


@pytest.mark.parametrize("path", ["/v2/trace/setting", "/v2/logging", "/v2/systemsharedmemory/status"])
def test_who_has_no_key_is_not_told_what_is_lacking(kept, path):
    assert kept.http.get(path).status_code == 401
    assert kept.http.get(path, headers=bearer(kept.keys["read"])).status_code == 400


def test_a_route_that_nobody_has_decided_about_cannot_be_made():
    router = APIRouter(route_class=KeyedRoute)
    with pytest.raises(LookupError, match=r"access\.py what a key must be good for: POST /models/\{model\}/train"):
        router.add_api_route("/models/one/train", lambda: None, methods=["POST"])


@pytest.mark.parametrize("prefix", ["", "/models/one"])
def test_the_routes_of_a_model_by_its_name_need_what_those_of_the_default_one_need(prefix):
    assert need_of("PUT", f"{prefix}/clients/{{client_id}}/state") == "write"


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_a_key_only_probes_are_answered(kept, assert_problem, method, path):
    reply = kept.http.request(method, at(path))
    if NEEDS[f"{method} {path}"] == ANYBODY:
        assert reply.status_code == 200
    else:
        assert_problem(reply, 401, "unauthorized")
        assert reply.headers["www-authenticate"] == 'Bearer realm="acclimate"'


@pytest.mark.parametrize("path", ["/", "/nowhere", "/models/fashion-cnn/nowhere", "/clients/cam-7", "/v2/health/live/"])
def test_who_has_no_key_does_not_learn_what_there_is(kept, path):
    assert kept.http.get(path).status_code == 401


@pytest.mark.parametrize("path", sorted(PAGES))
def test_the_interface_is_described_to_everybody(kept, path):
    assert kept.http.get(path).status_code == 200


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("prefix", ["", "/models/fashion-cnn"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_key_is_good_for_its_scope_alone(kept, assert_problem, method, path, prefix, scope):
    of_client = path.startswith("/clients/")
    reply = kept.http.request(method, (prefix if of_client else "") + at(path), headers=bearer(kept.keys[scope]))
    need = NEEDS[f"{method} {path}"]
    if need in (scope, ANY_KEY, ANYBODY):
        assert reply.status_code not in (401, 403)
    else:
        problem = assert_problem(reply, 403, "scope_missing")
        assert problem["detail"].endswith(f"with scope {need}")


@pytest.mark.parametrize(
    "value",
    [
        "Bearer acclimate_00000000_x",
        "Bearer",
        "Basic YTpi",
        "acclimate_00000000_x",
        "Bearer a b",
        f"Bearer {'x' * 5000}",
    ],
)
@pytest.mark.parametrize("path", ["/clients/cam-7", "/v2/health/ready", "/docs"])
def test_a_wrong_key_is_refused_everywhere(kept, assert_problem, path, value):
    reply = kept.http.get(path, headers={"Authorization": value})
    assert_problem(reply, 401, "unauthorized")
    assert 'error="invalid_token"' in reply.headers["www-authenticate"]


def test_two_keys_are_none(kept):
    key = f"Bearer {kept.keys['read']}"
    headers = [("Authorization", key), ("Authorization", key)]
    assert kept.http.get("/clients/cam-7", headers=headers).status_code == 401


def test_the_word_bearer_is_written_as_anybody_likes(kept):
    assert kept.http.get("/models", headers={"Authorization": f"bEARER  {kept.keys['read']}"}).status_code == 200


def test_the_sdk_sends_its_key(kept, stream):
    (images,) = stream(0, 1, 2)
    with Client(kept.replica.url, api_key=kept.keys["predict"], max_retries=0) as client:
        assert client.predict("sdk", images).client_id == "sdk"
        with pytest.raises(ScopeMissingError):
            client.reset("sdk")
    with Client(kept.replica.url, max_retries=0) as client, pytest.raises(UnauthorizedError):
        client.predict("sdk", images)


def test_keys_are_changed_without_a_restart(kept, stream, wait_until):
    (old, old_line), (new, new_line) = (create("rotating", ["read", "predict"]) for _ in range(2))
    others = kept.file.read_text()

    def status(key):
        return kept.http.get("/models", headers=bearer(key)).status_code

    assert status(old) == 401
    kept.file.write_text(f"{others}\n{old_line}")
    wait_until(lambda: status(old) == 200)
    (kept.file.parent / "next").write_text(f"{others}\n{old_line}\n{new_line}")
    (kept.file.parent / "next").replace(kept.file)  # as a Secret of Kubernetes is: by another file
    while status(new) != 200:
        assert status(old) == 200
    kept.file.write_text(f"{others}\n{new_line}")
    wait_until(lambda: status(old) == 401)
    assert status(new) == 200
    kept.file.write_text("broken")
    wait_until(lambda: [each["task"] for each in kept.http.get("/v2/health/ready").json()["failing"]] == ["keys"])
    assert status(new) == 200
    kept.file.write_text(others)
    wait_until(lambda: not kept.http.get("/v2/health/ready").json()["failing"])


def test_no_key_is_logged(kept, caplog, stream):
    caplog.set_level(logging.DEBUG)
    for key in (*kept.keys.values(), "acclimate_00000000_guess"):
        kept.http.post("/clients/cam-7/predict", content=b"x", headers=bearer(key))
    assert not [key for key in (*kept.keys.values(), "guess") if key in caplog.text.replace(kept.replica.url, "")]


def test_a_request_is_refused_before_its_body_comes(kept):
    url = httpx.URL(kept.replica.url)
    with socket.create_connection((url.host, url.port), timeout=20) as caller:
        caller.sendall(b"POST /clients/cam-7/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        assert caller.recv(100).startswith(b"HTTP/1.1 401 ")


def test_replies_are_safe_for_browsers(kept):
    for path in ("/models", "/v2/health/live", "/nowhere"):
        headers = kept.http.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["x-frame-options"] == "DENY"
        assert "default-src 'none'" in headers["content-security-policy"]
    assert "content-security-policy" not in kept.http.get("/docs").headers


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "acclimate.example"])
def test_nobody_is_let_in_from_outside_without_keys_unless_the_operator_says_so(host, tmp_path):
    with pytest.raises(SettingsError, match="ACCLIMATE_ALLOW_ANONYMOUS=true"):
        _require_keys(read_settings(host=host))
    _require_keys(read_settings(host=host, allow_anonymous=True))
    _require_keys(read_settings(host=host, keys_file=tmp_path / "keys"))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_machine_itself_needs_no_keys(host):
    _require_keys(read_settings(host=host))


def test_keys_and_nobody_asked_for_them_contradict_each_other(tmp_path):
    with pytest.raises(SettingsError, match="ACCLIMATE_ALLOW_ANONYMOUS"):
        _require_keys(read_settings(keys_file=tmp_path / "keys", allow_anonymous=True))
