"""`GET /clients`: pages, filters, and whose clients are shown."""

from datetime import UTC, datetime, timedelta

import pytest

from acclimate_client import LabelledRow
from acclimate_service.http.routes.clients import LARGEST_PAGE, SMALLEST_PAGE
from acclimate_service.keys import create


def pages(http, query="", headers=None, path="/clients"):
    """All pages of a listing."""
    found, cursor = [], ""
    while cursor is not None:
        joined = "&".join(filter(None, (query, f"cursor={cursor}" if cursor else "")))
        reply = http.get(f"{path}?{joined}", headers=headers)
        assert reply.status_code == 200, reply.text
        found.append(reply.json())
        cursor = found[-1]["next"]
    return found


def listed(http, query="", **more):
    return {each["client_id"]: each for page in pages(http, query, **more) for each in page["clients"]}


@pytest.fixture(scope="module")
def fleet(run_service, tmp_path_factory, stream):
    """Sixty clients: of every third the adapter is another, and one is paused."""
    with run_service(data_dir=tmp_path_factory.mktemp("fleet")) as replica, replica.sdk() as sdk:
        (images,) = stream(0, 1, 2)
        for number in range(60):
            if number % 3 == 0:
                sdk.configure(f"cam-{number}", "fedcal")
            sdk.predict(f"cam-{number}", images)
        sdk.pause("cam-1")
        yield replica


@pytest.mark.parametrize("limit", [SMALLEST_PAGE, 17, 59, 60, 61, LARGEST_PAGE])
def test_every_client_is_on_a_page_and_no_page_has_more_than_asked_for(fleet, limit):
    found = pages(fleet.http, f"limit={limit}")
    assert {each["client_id"] for page in found for each in page["clients"]} == {f"cam-{n}" for n in range(60)}
    assert max(len(page["clients"]) for page in found) <= limit
    assert {page["model"]["name"] for page in found} == {"fashion-cnn"}


def test_a_client_is_listed_as_it_is_described(fleet):
    by_name = listed(fleet.http, path="/models/fashion-cnn/clients")
    assert by_name == listed(fleet.http)
    paused, configured = by_name["cam-1"], by_name["cam-3"]
    described = fleet.http.get("/clients/cam-1").json()
    assert paused["adaptation"] == described["adaptation"] == "paused"
    assert (paused["version"], paused["bytes"]) == (described["state"]["version"], described["state"]["bytes"])
    assert (configured["adapter"], configured["hyperparameters"]) == ("fedcal", {})
    assert (configured["verdict"], described["guard"]["verdict"]) == ("undecided", "undecided")
    assert datetime.now(UTC) - datetime.fromisoformat(configured["changed_at"]) < timedelta(minutes=5)


@pytest.mark.parametrize("limit", [SMALLEST_PAGE, 100])
def test_clients_are_filtered_by_adapter(fleet, limit):
    assert listed(fleet.http, f"limit={limit}&adapter=fedcal").keys() == {f"cam-{n}" for n in range(0, 60, 3)}
    assert listed(fleet.http, f"limit={limit}&adapter=nobody-has-it") == {}


def test_clients_are_filtered_by_their_last_change(fleet, stream):
    now = datetime.now(UTC)
    asked = f"active_since={(now + timedelta(hours=1)).isoformat().replace('+', '%2B')}"
    assert listed(fleet.http, asked) == {}
    key = next(key for key in fleet.redis.keys("acc:{default/cam-5}:*:h"))
    before = fleet.redis.hget(key, "on")
    fleet.redis.hset(key, "on", int(1000 * (now - timedelta(days=2)).timestamp()))
    yesterday = f"active_since={(now - timedelta(days=1)).strftime('%Y-%m-%dT%H:%M:%SZ')}"
    assert listed(fleet.http).keys() - listed(fleet.http, yesterday).keys() == {"cam-5"}
    fleet.redis.hset(key, "on", before)


def test_clients_are_filtered_by_verdict(make_replica, serial, stream):
    batches = stream(0, 3)
    truth = [[int(row.argmax()) for row in each] for each in serial.probabilities("bn_adapt", batches)]
    replica = make_replica(adapter="fedcal")
    with replica.sdk() as sdk:
        for images, labels in zip(batches, truth, strict=True):
            prediction = sdk.predict("told", images)
            adapted = prediction.indices.tolist()
            wrong = [label if label != mine else (mine + 1) % 10 for label, mine in zip(labels, adapted, strict=True)]
            sdk.feedback("told", [LabelledRow(prediction.request_id, row, each) for row, each in enumerate(wrong)])
        sdk.predict("untold", batches[0])
    verdicts = {name: each["verdict"] for name, each in listed(replica.http).items()}
    assert verdicts["untold"] == "undecided"
    assert verdicts["told"] == replica.http.get("/clients/told").json()["guard"]["verdict"]
    for verdict in ("trusted", "undecided", "harmful"):
        wanted = {name for name, each in verdicts.items() if each == verdict}
        assert listed(replica.http, f"verdict={verdict}").keys() == wanted


def test_without_a_guard_there_is_no_verdict(make_replica, stream):
    replica = make_replica(guard="off")
    with replica.sdk() as sdk:
        sdk.predict("cam", stream(0, 1, 2)[0])
    assert listed(replica.http)["cam"]["verdict"] is None
    assert listed(replica.http, "verdict=undecided") == {}


@pytest.mark.parametrize(
    ("query", "said"),
    [
        (f"limit={SMALLEST_PAGE - 1}", f"greater than or equal to {SMALLEST_PAGE}"),
        (f"limit={LARGEST_PAGE + 1}", f"less than or equal to {LARGEST_PAGE}"),
        ("limit=many", "limit"),
        ("limit=10&limit=20", "more than once"),
        ("cursor=abc", "begin it again without a cursor"),
        ("cursor=" + 100 * "a", "cursor"),
        ("active_since=yesterday", "active_since"),
        ("active_since=1767225600", "it is a time such as 2026-11-28T16:00:00Z"),
        ("active_since=2026-01-01T00:00:00", "timezone"),
        ("verdict=good", "'trusted', 'undecided' or 'harmful'"),
        ("page=2", "accepted are: limit, cursor, adapter, active_since, verdict"),
    ],
)
def test_what_is_no_question_is_refused(fleet, assert_problem, query, said):
    assert said in assert_problem(fleet.http.get(f"/clients?{query}"), 422, "invalid_request")["detail"]


def test_each_tenant_sees_its_own_clients_alone(run_service, tmp_path, stream):
    made = {tenant: create(tenant, ["predict", "read"]) for tenant in ("acme", "acm")}
    (tmp_path / "keys").write_text("\n".join(line for _, line in made.values()))
    (images,) = stream(0, 1, 2)
    with run_service(keys_file=tmp_path / "keys", data_dir=tmp_path / "data") as replica:
        for tenant, (key, _) in made.items():
            with replica.sdk(api_key=key) as sdk:
                sdk.predict(f"of-{tenant}", images)
                sdk.predict("shared", images)
        for tenant, (key, _) in made.items():
            found = listed(replica.http, headers={"Authorization": f"Bearer {key}"})
            assert found.keys() == {f"of-{tenant}", "shared"}


def test_a_deleted_client_is_not_listed(make_replica, stream):
    replica = make_replica()
    with replica.sdk() as sdk:
        sdk.predict("cam", stream(0, 1, 2)[0])
        sdk.delete("cam")
    assert listed(replica.http) == {}
