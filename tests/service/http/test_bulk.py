"""Many clients at once: `GET /states` and `DELETE /clients`."""

import json
from base64 import b64decode

import pytest

from acclimate_service.http.routes.clients import LARGEST_PAGE, SMALLEST_PAGE
from acclimate_service.keys import create


def lines_of(reply):
    """The lines of a page: states, failures, and the last one."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/jsonl"
    *clients, end = map(json.loads, reply.text.splitlines())
    assert end["exported"] + end["failed"] == len(clients)
    return clients, end


def exported(http, query="", headers=None, path="/states"):
    """All pages."""
    found, cursor = [], ""
    while cursor is not None:
        joined = "&".join(filter(None, (query, f"cursor={cursor}" if cursor else "")))
        clients, end = lines_of(http.get(f"{path}?{joined}", headers=headers))
        found.append(clients)
        cursor = end["next"]
    return found


def delete_all(http, query, headers=None):
    """All pages; who was removed, and who was not."""
    deleted, failed, cursor = [], [], ""
    while cursor is not None:
        reply = http.delete(f"/clients?{query}" + (f"&cursor={cursor}" if cursor else ""), headers=headers)
        assert reply.status_code == 200, reply.text
        page = reply.json()
        deleted, failed, cursor = deleted + page["deleted"], failed + page["failed"], page["next"]
    return deleted, failed


@pytest.fixture
def fleet(make_replica, stream):
    """Thirty clients, every third of another adapter."""
    replica, (images,) = make_replica(adapter="em"), stream(0, 1, 2)
    with replica.sdk() as sdk:
        for number in range(30):
            if number % 3 == 0:
                sdk.configure(f"cam-{number}", "fedcal", estimator="em")
            sdk.predict(f"cam-{number}", images)
    return replica


def test_every_state_comes_as_it_comes_by_itself_and_can_be_put_in_again(fleet):
    pages = exported(fleet.http, f"limit={SMALLEST_PAGE}")
    assert max(map(len, pages)) <= SMALLEST_PAGE
    found = {each["client_id"]: each for page in pages for each in page}
    assert found.keys() == {f"cam-{number}" for number in range(30)}
    one = found["cam-3"]
    alone = fleet.http.get("/clients/cam-3/state")
    assert (b64decode(one["state"]), f'"v{one["version"]}"') == (alone.content, alone.headers["etag"])
    assert (one["adapter"], one["hyperparameters"]) == ("fedcal", {"estimator": "em"})
    with fleet.sdk() as sdk:
        sdk.configure("copy", one["adapter"], **one["hyperparameters"])
        assert sdk.import_state("copy", b64decode(one["state"])).state.committed is True
    assert exported(fleet.http, "adapter=em", path="/models/fashion-cnn/states") == exported(fleet.http, "adapter=em")
    assert len(exported(fleet.http, "adapter=em")[0]) == 20


def test_a_state_that_cannot_be_read_is_named_and_the_others_come(fleet):
    (head,) = fleet.redis.keys("acc:{default/cam-3}:*:h")
    fleet.redis.hset(head, "sum", "0" * 64)

    async def forget():
        fleet.service.sessions.drop("cam-3")

    fleet.run(forget())
    clients, end = lines_of(fleet.http.get(f"/states?adapter=fedcal&limit={LARGEST_PAGE}"))
    assert end == {"exported": 9, "failed": 1, "next": None}
    (failed,) = (each for each in clients if "state" not in each)
    assert (failed["client_id"], failed["code"], failed["state_committed"]) == ("cam-3", "state_corrupt", False)


def test_those_that_fit_are_removed_and_the_others_stay(fleet):
    deleted, failed = delete_all(fleet.http, f"adapter=fedcal&limit={SMALLEST_PAGE}")
    assert (sorted(deleted), failed) == (sorted(f"cam-{number}" for number in range(0, 30, 3)), [])
    assert fleet.http.get("/clients/cam-3").status_code == 404
    assert len(fleet.http.get("/clients").json()["clients"]) == 20
    assert len(delete_all(fleet.http, "all=true")[0]) == 20
    assert fleet.http.get("/clients").json()["clients"] == []
    assert delete_all(fleet.http, "all=true") == ([], [])


def test_a_client_that_stays_is_named(fleet, monkeypatch):
    delete = type(fleet.service.clients).delete

    async def failing(self, request):
        if request.client.name == "cam-3":
            raise RuntimeError("the disk is gone")
        await delete(self, request)

    monkeypatch.setattr(type(fleet.service.clients), "delete", failing)
    deleted, (failed,) = delete_all(fleet.http, "adapter=fedcal")
    assert (len(deleted), failed["client_id"], failed["code"]) == (9, "cam-3", "internal")
    assert "disk" not in failed["detail"]
    assert [each["client_id"] for each in fleet.http.get("/clients?adapter=fedcal").json()["clients"]] == ["cam-3"]


def test_clients_that_are_not_reached_in_time_are_named_and_there_still(fleet):
    reply = fleet.http.delete("/clients?all=true", headers={"X-Request-Timeout-Ms": "1"})
    page = reply.json()
    assert (reply.status_code, len(page["deleted"]) + len(page["failed"])) == (200, 30)
    assert {each["code"] for each in page["failed"]} == {"deadline_exceeded"}
    left = {each["client_id"] for each in fleet.http.get("/clients").json()["clients"]}
    assert left == {each["client_id"] for each in page["failed"]} != set()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "nothing says which clients are meant; give adapter, active_since, verdict, or all=true"),
        ("all=false", "nothing says which clients are meant"),
        ("all=true&all=true", "more than once"),
        ("all=true&limit=0", f"greater than or equal to {SMALLEST_PAGE}"),
        ("all=true&cursor=abc", "begin it again without a cursor"),
        ("all=true&name=cam-1", "accepted are: limit, cursor, all, adapter, active_since, verdict"),
    ],
)
def test_what_does_not_say_which_clients_removes_none(replica, stream, assert_problem, query, said):
    with replica.sdk() as sdk:
        sdk.predict("kept", stream(0, 1, 2)[0])
    assert said in assert_problem(replica.http.delete(f"/clients?{query}"), 422, "invalid_request")["detail"]
    assert replica.http.get("/clients/kept").status_code == 200


def test_each_tenant_has_its_own_clients_alone(run_service, tmp_path, stream):
    made = {tenant: create(tenant, ["predict", "read", "write"]) for tenant in ("acme", "acm")}
    (tmp_path / "keys").write_text("\n".join(line for _, line in made.values()))
    headers = {tenant: {"Authorization": f"Bearer {key}"} for tenant, (key, _) in made.items()}
    (images,) = stream(0, 1, 2)
    with run_service(keys_file=tmp_path / "keys", data_dir=tmp_path / "data") as replica:
        for tenant, (key, _) in made.items():
            with replica.sdk(api_key=key) as sdk:
                for name in ("shared", f"of-{tenant}"):
                    sdk.predict(name, images)
        before = replica.keys("acm/shared"), replica.keys("acm/of-acm")
        for tenant, each in headers.items():
            (page,) = exported(replica.http, headers=each)
            assert {client["client_id"] for client in page} == {"shared", f"of-{tenant}"}
        assert sorted(delete_all(replica.http, "all=true", headers["acme"])[0]) == ["of-acme", "shared"]
        assert (replica.keys("acm/shared"), replica.keys("acm/of-acm")) == before
        assert replica.keys("acme/shared").keys() & replica.keys("acm/shared").keys() == set()
