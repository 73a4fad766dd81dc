"""What one tenant can learn of another's clients, or do to them: nothing, whatever the route."""

import random
import re
import statistics
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from acclimate_client.errors import RateExceededError
from acclimate_service.http.access import NEEDS
from acclimate_service.keys import SCOPES, create
from acclimate_service.state import ClientScope, Wire, running_at

ROUTES = [name.split() for name in NEEDS if "{client_id}" in name]
CHANGING = [each for each in ROUTES if each[0] != "GET"]
RAW = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def house(run_service, tmp_path_factory):
    """A service of two tenants on a Redis that has served without keys before, whose `old` client is nobody's."""
    folder = tmp_path_factory.mktemp("tenants")
    made = {tenant: create(tenant, SCOPES) for tenant in ("one", "two")}
    (folder / "keys").write_text("\n".join(line for _, line in made.values()))
    common = {"adapter": "fedthe", "data_dir": folder / "data", "round_interval_s": 10_000, "ask_budget": 0}  # no lots
    common["keep_images_bytes"] = 2**20
    with run_service(**common, keys_file=folder / "keys") as replica:
        headers = {tenant: {"Authorization": f"Bearer {key}"} for tenant, (key, _) in made.items()}
        yield SimpleNamespace(replica=replica, http=replica.http, headers=headers)


@pytest.fixture(scope="module")
def ask(house, stream):
    """Send what a route takes, sound in every way, as a tenant; ids and keys as given."""
    (images,) = stream(0, 1, 4)
    tensor = {**RAW, "X-Tensor-Shape": ",".join(map(str, images.shape)), "X-Labels": "[0, 1, 2, 3]"}
    exported: dict[str, bytes] = {}

    def state() -> bytes:
        if not exported:
            send("one", "POST", "/clients/{client_id}/predict", "source")
            exported["state"] = send("one", "GET", "/clients/{client_id}/state", "source").content
        return exported["state"]

    bodies: dict[str, Any] = {
        "POST /clients/{client_id}/predict": lambda: {"content": images.tobytes(), "headers": tensor},
        "POST /clients/{client_id}/enroll": lambda: {"content": images.tobytes(), "headers": tensor},
        "POST /clients/{client_id}/feedback": lambda: {
            "json": {"rows": [{"request_id": "0" * 32, "row": 0, "label": 1}]}
        },
        "GET /clients/{client_id}": dict,
        "GET /clients/{client_id}/asks": dict,
        "GET /clients/{client_id}/images": dict,
        "GET /clients/{client_id}/timeline": dict,
        "GET /clients/{client_id}/timeline/live": dict,
        "GET /clients/{client_id}/state": dict,
        "PUT /clients/{client_id}": lambda: {"json": {"adapter": "fedcal"}},
        "DELETE /clients/{client_id}": dict,
        "POST /clients/{client_id}/reset": dict,
        "POST /clients/{client_id}/rollback": dict,
        "PUT /clients/{client_id}/state": lambda: {"content": state(), "headers": RAW},
    }

    def send(tenant: str, method: str, path: str, client: str, key: str = "", prefix: str = "", **changes: Any):
        given = {**bodies[f"{method} {path}"](), **changes}
        keyed = {"Idempotency-Key": key} if key and method != "GET" else {}
        headers = {**given.pop("headers", {}), **house.headers[tenant], **keyed}
        return house.http.request(method, prefix + path.format(client_id=client), headers=headers, **given)

    return send


@pytest.fixture
def calls(house, monkeypatch):
    """Record what is asked of Redis that names one of these clients, and under which of its keys."""
    asked: list[tuple[str, str]] = []
    run, read = Wire.run, Wire.read

    async def recording_run(wire, script, keys, *args):
        asked.append((script.name, " ".join(keys)))
        return await run(wire, script, keys, *args)

    async def recording_read(wire, *command, **options):
        asked.append((str(command[0]), " ".join(map(str, command[1:]))))
        return await read(wire, *command, **options)

    monkeypatch.setattr(Wire, "run", recording_run)
    monkeypatch.setattr(Wire, "read", recording_read)

    @contextmanager
    def record(client: str):
        before = len(asked)
        found: list[tuple[str, str]] = []
        yield found
        named = [(name, text) for name, text in asked[before:] if f"/{client}}}" in text]
        found.extend((name, re.sub(r"s:[0-9a-f]{16}", "s:", text.replace(client, "ID"))) for name, text in named)

    return record


def told(reply, client):
    """All of a reply but what differs from request to request."""
    text = reply.text.replace(client, "ID")
    varying = r'"request_id":"[0-9a-f]{32}"|"(expires_in_s|at|key_expires_at_earliest)":("[^"]*"|\d+)'
    dropped = ("x-request-id", "date", "content-length", "server-timing")
    headers = {name: value for name, value in reply.headers.items() if name not in dropped}
    return reply.status_code, headers, re.sub(varying, "", text)


def test_the_suite_knows_every_route_of_a_client(house):
    described = house.http.get("/openapi.json").json()["paths"]
    there = {
        f"{method.upper()} {path}"
        for path, operations in described.items()
        for method in operations
        if path.startswith("/clients/")
    }
    assert {f"{method} {path}" for method, path in ROUTES} == there


OF_MANY = {
    "GET /clients": "GET /clients",
    "GET /states": "GET /states",
    "GET /models/{model}/states": "GET /models/fashion-cnn/states",
    "DELETE /clients": "DELETE /clients?all=true",
    "GET /asks": "GET /asks",
    "GET /models/{model}/asks": "GET /models/fashion-cnn/asks",
}
"""What is asked of routes that name no client, and are about those of the caller."""
BY_BODY = {"POST /v2/models/{model}/infer", "POST /v2/models/{model}/versions/{version}/infer"}
"""Have a test of their own."""


def test_the_suite_knows_every_route_that_is_about_clients_and_names_none():
    about = {name for name, need in NEEDS.items() if need in ("predict", "read", "write")}
    assert about - {" ".join(each) for each in ROUTES} == OF_MANY.keys() | BY_BODY


@pytest.mark.parametrize("asked", OF_MANY.values())
def test_routes_of_many_clients_show_and_touch_those_of_the_tenant_alone(house, ask, asked):
    for tenant, client in (("one", "among-many"), ("two", "own-of-two")):
        assert ask(tenant, "POST", "/clients/{client_id}/predict", client).status_code == 200
    before = house.replica.keys("one/among-many")
    method, path = asked.split()
    reply = house.http.request(method, path, headers=house.headers["two"])
    assert reply.status_code == 200
    assert "among-many" not in reply.text
    assert ("own-of-two" in reply.text) is ("asks" not in path)  # nobody is asked anything here
    assert house.replica.keys("one/among-many") == before


@pytest.mark.parametrize("prefix", ["", "/models/fashion-cnn"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_the_client_of_another_tenant_is_like_one_that_nobody_has(house, ask, calls, method, path, prefix):
    """The same reply by the same exchanges with Redis, and nothing of the other's is touched."""
    number = ROUTES.index([method, path]) * 2 + bool(prefix)
    foreign, unknown = f"foreign-{number:02}", f"unknown-{number:02}"
    assert ask("one", "POST", "/clients/{client_id}/predict", foreign, "its-key").status_code == 200
    before = house.replica.keys(f"one/{foreign}")
    assert before
    seen = []
    for client in (foreign, unknown):
        with calls(client) as asked:
            reply = ask("two", method, path, client, "its-key", prefix)
            house.replica.keys(f"two/{client}")  # until nothing follows in the background
        seen.append((told(reply, client), asked))
    assert seen[0] == seen[1]
    assert seen[0][0][0] < 500
    assert house.replica.keys(f"one/{foreign}") == before


@pytest.mark.parametrize(("method", "path"), CHANGING)
def test_an_idempotency_key_of_another_tenant_is_no_repeat(house, ask, method, path):
    client = f"keyed-{CHANGING.index([method, path])}"
    for tenant in ("one", "two"):
        for _ in range(2):
            ask(tenant, "POST", "/clients/{client_id}/predict", client)
    first = ask("one", method, path, client, "shared-key")
    second = ask("two", method, path, client, "shared-key", **_other(method, path))
    assert second.status_code == first.status_code or second.json()["code"] != "key_reused"
    if second.is_success and second.content:
        assert second.json()["state"]["replayed"] == "none"


def _other(method, path):
    return {"json": {"adapter": "none"}} if (method, path) == ("PUT", "/clients/{client_id}") else {}


def test_rows_of_another_tenant_cannot_be_labelled(house, ask):
    names = {}
    for tenant in ("one", "two"):
        names[tenant] = ask(tenant, "POST", "/clients/{client_id}/predict", "labelled").json()["request_id"]
    before = house.replica.keys("one/labelled")
    rows = {"rows": [{"request_id": name, "row": 0, "label": 1} for name in (names["one"], "0" * 32, names["two"])]}
    counted = ask("two", "POST", "/clients/{client_id}/feedback", "labelled", json=rows).json()["feedback"]
    assert counted == {"counted": 1, "duplicate": 0, "contradicting": 0, "unknown": 2}
    assert house.replica.keys("one/labelled") == before


def test_a_client_that_is_deleted_leaves_its_namesakes(house, ask):
    for tenant in ("one", "two"):
        ask(tenant, "POST", "/clients/{client_id}/predict", "namesake")
    before = house.replica.keys("one/namesake")
    assert ask("two", "DELETE", "/clients/{client_id}", "namesake").status_code == 204
    assert house.replica.keys("one/namesake") == before
    assert ask("two", "GET", "/clients/{client_id}", "namesake").status_code == 404
    assert ask("one", "GET", "/clients/{client_id}", "namesake").json()["state"]["tier"] == "memory"


@pytest.mark.parametrize("client", ["one%2Fsource", "..%2Fone%2Fsource", "one/source", "one~source", "~clients"])
def test_no_spelling_of_an_id_leads_to_another_tenant(house, ask, client):
    ask("one", "POST", "/clients/{client_id}/predict", "source")
    assert ask("two", "GET", "/clients/{client_id}", client).status_code in (404, 422)


def test_clients_are_named_to_their_tenant_as_it_names_them(house, ask):
    predicted = ask("one", "POST", "/clients/{client_id}/predict", "named")
    assert predicted.json()["client_id"] == "named"
    assert ask("one", "GET", "/clients/{client_id}", "named").json()["client_id"] == "named"
    for method, path in ROUTES:
        if not path.endswith("/live"):  # which does not end
            assert "one/" not in ask("one", method, path, "nameless").text


def test_what_all_may_ask_names_nobody(house, ask):
    ask("one", "POST", "/clients/{client_id}/predict", "secretive")
    for path in ("/metrics", "/models", "/adapters", "/models/fashion-cnn/adapters"):
        text = house.http.get(path, headers=house.headers["two"]).text
        assert "secretive" not in text
        assert "one/" not in text


def test_the_inference_protocol_names_clients_of_the_tenant_alone(house, ask, stream):
    (images,) = stream(0, 1, 2)

    def infer(tenant, client, key="v2-key"):
        tensor = {"name": "images", "shape": list(images.shape), "datatype": "UINT8", "data": images.ravel().tolist()}
        body = {"id": key, "inputs": [tensor], "parameters": {"client_id": client}}
        return house.http.post("/v2/models/fashion-cnn/infer", json=body, headers=house.headers[tenant])

    assert infer("one", "v2-cam").json()["parameters"]["state_version"] == 1
    before = house.replica.keys("one/v2-cam")
    replies = [infer("two", client) for client in ("v2-cam", "v2-other")]
    for reply in replies:
        assert reply.json()["parameters"]["state_version"] == 1
        assert reply.json()["parameters"]["state_replayed"] == "none"
    assert infer("one", "v2-cam").json()["parameters"]["state_replayed"] == "stored"
    assert house.replica.keys("one/v2-cam") == before
    for spelled in ("one/v2-cam", "../one/v2-cam", "~clients"):
        assert infer("two", spelled).status_code == 422


def test_how_many_clients_all_have_is_for_operators(run_service, tmp_path):
    made = {scope: create("one", [scope]) for scope in ("read", "admin")}
    (tmp_path / "keys").write_text("\n".join(line for _, line in made.values()))
    with run_service(keys_file=tmp_path / "keys", data_dir=tmp_path / "data") as replica:
        told = {}
        for scope, (key, _) in made.items():
            reply = replica.http.get("/models", headers={"Authorization": f"Bearer {key}"})
            told[scope] = reply.json()["models"][0].keys()
    assert told["admin"] - told["read"] == {"states_of_other_models"}


def test_each_tenant_has_its_own_places(run_service, tmp_path, stream, assert_problem):
    made = {tenant: create(tenant, ["predict", "write"]) for tenant in ("one", "two")}
    (tmp_path / "keys").write_text("\n".join(line for _, line in made.values()))
    (images,) = stream(0, 1, 2)
    with run_service(keys_file=tmp_path / "keys", data_dir=tmp_path / "data", max_clients=2) as replica:
        clients = {tenant: replica.sdk(api_key=key) for tenant, (key, _) in made.items()}
        for tenant in ("one", "two"):
            for name in ("a", "b"):
                clients[tenant].predict(name, images)
            with pytest.raises(Exception, match="there are 2 clients"):
                clients[tenant].predict("c", images)
        clients["two"].delete("a")
        clients["two"].predict("c", images)
        with pytest.raises(Exception, match="there are 2 clients"):
            clients["one"].predict("c", images)
        for client in clients.values():
            client.close()


def test_each_tenant_has_its_own_bytes(run_service, tmp_path, stream, assert_problem):
    made = {tenant: create(tenant, ["predict", "read", "write"]) for tenant in ("one", "two")}
    (tmp_path / "keys").write_text("\n".join(line for _, line in made.values()))
    headers = {tenant: {"Authorization": f"Bearer {key}"} for tenant, (key, _) in made.items()}
    (images,) = stream(0, 1, 2)
    tensor = {**RAW, "X-Tensor-Shape": "2,1,28,28"}
    settings = {"adapter": "em", "keys_file": tmp_path / "keys", "data_dir": tmp_path / "data"}
    with run_service(**settings, tenant_bytes=50_000) as replica:

        def send(tenant, client):
            sent = {**headers[tenant], **tensor}
            return replica.http.post(f"/clients/{client}/predict", content=images.tobytes(), headers=sent)

        replies = [send("one", f"cam-{number // 2}") for number in range(60)]
        refused = next(each for each in replies if each.status_code != 200)
        problem = assert_problem(refused, 507, "store_full")
        assert "ACCLIMATE_TENANT_BYTES" in problem["detail"]
        assert (refused.headers["retry-after"], refused.headers["ratelimit-policy"]) == ("5", '"bytes";q=50000')
        assert re.fullmatch(r'"bytes";r=\d{1,4}', refused.headers["ratelimit"])
        page = replica.http.get("/clients", headers=headers["one"]).json()
        usage = page["usage"]
        assert (usage["most_bytes"], usage["clients"]) == (50_000, len(page["clients"]))
        really = sum(each["bytes"] for each in page["clients"])
        assert 0.6 * really < usage["bytes"] <= 50_000
        assert [send("two", "cam").status_code for _ in range(3)] == [200] * 3
        replica.http.delete("/clients?all=true", headers=headers["one"])
        assert replica.http.get("/clients", headers=headers["one"]).json()["usage"]["bytes"] == 0
        assert send("one", "again").status_code == 200
        assert replica.http.get("/clients", headers=headers["two"]).json()["usage"]["clients"] == 1


def test_each_tenant_has_its_own_rate_of_images(run_service, tmp_path, stream, assert_problem):
    made = {tenant: create(tenant, ["predict", "write"]) for tenant in ("one", "two")}
    (tmp_path / "keys").write_text("\n".join(line for _, line in made.values()))
    (images,) = stream(0, 1, 4)
    settings = {"adapter": "fedthe", "keys_file": tmp_path / "keys", "data_dir": tmp_path / "data"}
    with run_service(**settings, tenant_rows_per_minute=4) as replica, ExitStack() as stack:
        one, two = (stack.enter_context(replica.sdk(api_key=key)) for key, _ in made.values())
        sends = [
            lambda sdk: sdk.predict("b", images),
            lambda sdk: sdk.predict("b", images, adapt=False),
            lambda sdk: sdk.enroll("b", images, [0, 1, 2, 3]),
            lambda sdk: sdk.feedback_images("a", images, [0, 1, 2, 3]),
        ]
        one.predict("a", images)
        for send in sends:
            with pytest.raises(
                RateExceededError, match=r"4 images are more than the [0-3] that are left of 4 in 60 s"
            ) as refused:
                send(one)
            assert refused.value.state_committed is False
            assert 0 < refused.value.retry_after <= 60
        two.predict("a", images)
        body = {"Content-Type": "application/octet-stream", "X-Tensor-Shape": "4,1,28,28"}
        headers = {"Authorization": f"Bearer {made['one'][0]}", **body}
        reply = replica.http.post("/clients/c/predict", content=images.tobytes(), headers=headers)
        assert_problem(reply, 429, "rate_exceeded")
        wait = int(reply.headers["retry-after"])
        tensor = {"name": "images", "shape": list(images.shape), "datatype": "UINT8", "data": images.ravel().tolist()}
        key = {"Authorization": headers["Authorization"]}
        frozen = replica.http.post("/v2/models/fashion-cnn/infer", json={"inputs": [tensor]}, headers=key)
        assert_problem(frozen, 429, "rate_exceeded")
        assert reply.headers["ratelimit-policy"] == '"images";q=4;w=60'
        assert re.fullmatch(rf'"images";r=[0-3];t={wait}', reply.headers["ratelimit"])
        one.reset("a")


def test_clients_from_before_there_were_keys_are_nobodys_and_stay_as_they_were(run_service, tmp_path, stream):
    (key, line), (images,) = create("one", ["predict", "read"]), stream(0, 1, 2)
    (tmp_path / "keys").write_text(line)
    with run_service(data_dir=tmp_path / "first") as keyless:
        with keyless.sdk() as client:
            client.predict("cam", images)
        before = keyless.keys("cam")
        assert {name.split(b":")[1] for name in before} == {b"{default/cam}"}
        with run_service(
            redis_url=running_at(tmp_path / "first"), keys_file=tmp_path / "keys", data_dir=tmp_path
        ) as keyed:
            with keyed.sdk(api_key=key) as client:
                assert client.predict("cam", images).state.version == 1
            assert keyed.keys("one/cam")
            assert keyed.keys("cam") == before
        with keyless.sdk() as client:
            assert client.predict("cam", images).state.version == 2


def test_callers_share_the_device_by_tenant(house, ask, monkeypatch):
    flows = []
    admission = house.replica.service.admission
    hold = type(admission.backlog).hold
    monkeypatch.setattr(
        type(admission.backlog), "hold", lambda self, flow, seconds: flows.append(flow) or hold(self, flow, seconds)
    )
    for tenant in ("one", "two"):
        ask(tenant, "POST", "/clients/{client_id}/predict", "fair")
    assert [flow[1:] for flow in flows] == [("one", "one/fair"), ("two", "two/fair")]


def test_a_client_of_an_owner_and_one_of_nobody_share_no_name():
    owned, plain = ClientScope("one/cam"), ClientScope("cam")
    assert (owned.owner, owned.name, plain.owner, plain.name) == ("one", "cam", "", "cam")
    assert owned.digest != plain.digest
    assert owned.rid("k") != plain.rid("k")
    for bad in ("/cam", "one/", "a/b/c", "one/~clients", "~x/cam"):
        with pytest.raises(ValueError, match="accepted are"):
            ClientScope(bad)


@pytest.mark.slow
def test_a_foreign_id_takes_as_long_as_an_unknown_one(house, ask):
    """Of two rows of 400 requests, in a random order, the medians differ by less than a fifth."""
    ask("one", "POST", "/clients/{client_id}/predict", "timed-a")
    seconds: dict[str, list[float]] = {"timed-a": [], "timed-b": []}
    for client in random.Random(0).sample(400 * [*seconds], 800):
        began = time.perf_counter()
        assert ask("two", "GET", "/clients/{client_id}", client).status_code == 404
        seconds[client].append(time.perf_counter() - began)
    foreign, unknown = map(statistics.median, seconds.values())
    assert abs(foreign - unknown) < 0.2 * unknown
