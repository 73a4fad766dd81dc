"""`GET /clients/{id}/timeline`, at once and as it happens."""

import json
from datetime import datetime, timedelta

import httpx
import numpy as np
import pytest

from acclimate_client import AsyncClient, Client
from acclimate_client.errors import ClientUnknownError, TimelineOffError


def points(replica, client, **query):
    reply = replica.http.get(f"/clients/{client}/timeline", params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()["points"]


def noted(replica, client, count, wait_until):
    """The timeline of a client, once so many changes are noted: those of a journal are after the reply."""
    wait_until(lambda: len(points(replica, client)) >= count)
    return points(replica, client)


def befell(replica, client):
    return [name for point in points(replica, client) for name in point["events"]]


@pytest.mark.parametrize("adapter", ["atp", "fedcal", "atp+fedcal"])
def test_each_batch_is_a_point_of_what_its_reply_said(make_replica, stream, post, wait_until, adapter):
    replica, batches = make_replica(adapter=adapter), stream(0, 3)
    replies = [post(replica, "cam", images).json() for images in batches]
    found = noted(replica, "cam", 3, wait_until)
    assert [point["version"] for point in found] == [1, 2, 3]
    assert [(point["batches"], point["images"]) for point in found] == [(1, len(batches[0]))] * 3
    for point, reply in zip(found, replies, strict=True):
        assert point["signals"]["entropy"] == pytest.approx(reply["signals"]["entropy"], rel=1e-3)
        assert 0 <= point["signals"]["agreement"] <= 1
        assert point["signals"]["frozen"] == 0
        assert point["verdict"] == "undecided"
        if adapter != "atp":
            assert point["prior"] == pytest.approx(reply["signals"]["prior"], rel=1e-3, abs=1e-6)
    if adapter != "fedcal":
        assert all(size > 0 for size in found[0]["modules"].values())
        assert "modules" not in found[1]


def test_agreement_is_the_share_of_images_on_which_both_models_agree(make_replica, stream, post, wait_until):
    replica, (images,) = make_replica(adapter="atp"), stream(0, 1)
    assert replica.http.put("/clients/plain", json={"adapter": "none"}).status_code == 200
    frozen, adapted = (
        [row["index"] for row in post(replica, client, images).json()["predictions"]] for client in ("plain", "cam")
    )
    (point,) = noted(replica, "cam", 1, wait_until)
    assert point["signals"]["agreement"] == pytest.approx(np.mean(np.equal(frozen, adapted)))
    assert noted(replica, "plain", 2, wait_until)[-1]["signals"]["agreement"] == 1


def test_the_prior_stands_beside_that_of_the_training(replica, stream, post):
    (images,) = stream(0, 1)
    post(replica, "beside", images)
    body = replica.http.get("/clients/beside/timeline").json()
    assert len(body["training_prior"]) == len(body["classes"]) == 10
    assert sum(body["training_prior"]) == pytest.approx(1)


def test_what_befalls_a_client_is_an_event(make_replica, stream, post, wait_until):
    replica, batches = make_replica(adapter="fedcal"), stream(0, 3)
    http = replica.http
    post(replica, "cam", batches[0])
    assert http.put("/clients/cam", json={"adaptation": "paused"}).status_code == 200
    post(replica, "cam", batches[1])  # answered, and no point
    assert http.put("/clients/cam", json={"adaptation": "running"}).status_code == 200
    assert http.put("/clients/cam", json={"adapter": "em"}).status_code == 200
    post(replica, "cam", batches[2])
    assert http.post("/clients/cam/reset").status_code == 200
    post(replica, "cam", np.zeros((8, 28, 28), np.uint8))
    found = [
        (point["version"], point["batches"], list(point["events"])) for point in noted(replica, "cam", 7, wait_until)
    ]
    assert found == [
        (1, 1, []),
        (2, 0, ["paused"]),
        (3, 0, ["resumed"]),
        (4, 0, ["configured"]),
        (5, 1, []),
        (6, 0, ["reset"]),
        (7, 1, ["skipped", "fallback"]),
    ]


def test_labels_and_a_rollback_are_events(make_replica, stream, post, wait_until):
    replica, batches = make_replica(adapter="fedcal"), stream(0, 2)
    first = post(replica, "cam", batches[0]).json()
    rows = {"rows": [{"request_id": first["request_id"], "row": 0, "label": 0}]}
    assert replica.http.post("/clients/cam/feedback", json=rows).status_code == 200
    post(replica, "cam", batches[1])
    assert replica.http.post("/clients/cam/rollback").status_code == 200
    noted(replica, "cam", 4, wait_until)
    assert befell(replica, "cam") == ["labels", "rollback"]


def test_the_frozen_answer_of_a_harmful_client_shows(make_replica, stream, post, wait_until):
    replica, (images,) = make_replica(adapter="fedcal", guard="frozen"), stream(0, 1)
    post(replica, "cam", images)
    (point,) = noted(replica, "cam", 1, wait_until)
    assert point["signals"]["frozen"] == 1


def test_since_and_resolution(replica, stream, post):
    for images in stream(1, 4):
        post(replica, "since", images)
    whole = points(replica, "since")
    times = [datetime.fromisoformat(point["at"]) for point in whole]
    assert times == sorted(times)
    assert [point["version"] for point in points(replica, "since", since=whole[2]["at"])] == [3, 4]
    (one,) = points(replica, "since", since=(times[0] - timedelta(seconds=1)).isoformat(), resolution=86_400)[-1:]
    assert one["version"] == 4
    assert sum(point["batches"] for point in points(replica, "since", resolution=86_400)) == 4
    mean = sum(point["signals"]["entropy"] for point in whole) / 4
    if one["batches"] == 4:  # not at midnight
        assert one["signals"]["entropy"] == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize(
    "query", ["?since=yesterday", "?since=2026-01-01T00:00:00", "?resolution=-1", "?resolution=1e9", "?until=1"]
)
def test_what_cannot_be_meant_is_refused(replica, stream, post, query):
    reply = replica.http.get(f"/clients/nobody/timeline{query}")
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")


def test_there_is_none_of_a_client_that_is_not_there(replica):
    for path in ("/clients/nobody/timeline", "/clients/nobody/timeline/live"):
        reply = replica.http.get(path)
        assert (reply.status_code, reply.json()["code"]) == (404, "client_unknown")


def test_without_timelines_nothing_is_kept_and_both_routes_say_so(make_replica, stream, post):
    replica, (images,) = make_replica(timeline=False, adapter="atp"), stream(0, 1)
    post(replica, "cam", images)
    assert [key for key in replica.redis.scan_iter() if key.endswith(b":t")] == []
    for path in ("/clients/cam/timeline", "/clients/cam/timeline/live"):
        reply = replica.http.get(path)
        assert (reply.status_code, reply.json()["code"]) == (409, "timeline_off")
        assert "ACCLIMATE_TIMELINE" in reply.json()["detail"]


def test_challengers_have_no_timeline(make_replica, stream, post, wait_until):
    replica = make_replica(adapter="fedcal", candidates=("em",), candidate_share=1.0)
    for images in stream(0, 2):
        post(replica, "cam", images)
    wait_until(lambda: len([key for key in replica.redis.scan_iter() if key.endswith(b":h")]) == 2)
    assert len([key for key in replica.redis.scan_iter() if key.endswith(b":t")]) == 1


def test_a_delete_removes_it_and_the_next_life_begins_with_an_empty_one(replica, stream, post):
    first, second = stream(2, 2)
    post(replica, "mortal", first)
    replica.http.delete("/clients/mortal")
    assert replica.http.get("/clients/mortal/timeline").status_code == 404
    post(replica, "mortal", second)
    assert [point["version"] for point in points(replica, "mortal")] == [1]


def events(lines):
    """The events of a stream of lines."""
    event = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            event[name] = value
        elif event:
            yield event
            event = {}


def test_what_happens_is_told_as_it_happens(replica, stream, post):
    first, second = stream(3, 2)
    post(replica, "live", first)
    with httpx.stream("GET", f"{replica.url}/clients/live/timeline/live", timeout=30) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        coming = events(reply.iter_lines())
        assert next(coming) == {"id": "1", "event": "begin", "data": "{}"}
        post(replica, "live", second)
        told = next(coming)
        assert (told["id"], told["event"]) == ("2", "point")
        assert json.loads(told["data"]) == points(replica, "live")[-1]


def test_whoever_comes_back_is_told_what_came_meanwhile(replica, stream, post):
    for images in stream(4, 3):
        post(replica, "back", images)
    headers = {"Last-Event-ID": "1"}
    with httpx.stream("GET", f"{replica.url}/clients/back/timeline/live", headers=headers, timeout=30) as reply:
        coming = events(reply.iter_lines())
        assert [next(coming)["id"] for _ in range(3)] == ["1", "2", "3"]


@pytest.mark.parametrize("last", ["-1", "x", "9" * 17])
def test_an_id_that_is_no_version_is_refused(replica, last):
    reply = replica.http.get("/clients/nobody/timeline/live", headers={"Last-Event-ID": last})
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")


def test_whoever_hangs_up_is_no_longer_counted_and_too_many_are_refused(
    make_replica, stream, post, wait_until, monkeypatch
):
    monkeypatch.setattr("acclimate_service.clients.timelines.MOST_WATCHERS", 1)
    replica, (images,) = make_replica(), stream(0, 1)
    post(replica, "cam", images)
    url = f"{replica.url}/clients/cam/timeline/live"
    with httpx.stream("GET", url, timeout=30) as reply:
        next(reply.iter_lines())
        refused = httpx.get(url)
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
    wait_until(lambda: replica.service.timelines._watchers == 0)


def test_a_watched_client_that_is_deleted_ends_the_stream(replica, stream, post):
    (images,) = stream(5, 1)
    post(replica, "ending", images)
    with httpx.stream("GET", f"{replica.url}/clients/ending/timeline/live", timeout=30) as reply:
        lines = reply.iter_lines()
        next(lines)
        replica.http.delete("/clients/ending")
        list(lines)  # to its end


def test_a_service_that_ends_ends_its_streams(make_replica, stream, post):
    replica, (images,) = make_replica(), stream(0, 1)
    post(replica, "cam", images)
    with httpx.stream("GET", f"{replica.url}/clients/cam/timeline/live", timeout=30) as reply:
        lines = reply.iter_lines()
        next(lines)
        replica.process.draining = True
        list(lines)


def test_the_sdk_reads_and_watches(replica, stream, post):
    batches = stream(6, 3)
    with Client(replica.url) as client:
        client.predict("sdk", batches[0])
        timeline = client.timeline("sdk")
        assert (timeline.client_id, len(timeline.classes), len(timeline.points)) == ("sdk", 10, 1)
        assert timeline.points[0].at.tzinfo is not None
        assert client.timeline("sdk", since=timeline.points[0].at + timedelta(seconds=1)).points == ()
        watching = client.watch("sdk", after=0)
        assert next(watching) == timeline.points[0]
        client.predict("sdk", batches[1])
        assert next(watching).version == 2
        client.delete("sdk")
        with pytest.raises(ClientUnknownError):
            next(watching)
        with pytest.raises(ValueError, match="resolution"):
            client.timeline("sdk", resolution=-1.0)


async def test_the_asynchronous_sdk_does_the_same(replica, stream):
    batches = stream(7, 2)
    async with AsyncClient(replica.url) as client:
        await client.predict("sdk-async", batches[0])
        timeline = await client.timeline("sdk-async", resolution=60)
        watching = client.watch("sdk-async", after=0)
        assert await anext(watching) == timeline.points[0]
        await client.predict("sdk-async", batches[1])
        assert (await anext(watching)).version == 2
        await watching.aclose()


def test_the_sdk_says_that_there_are_no_timelines(make_replica, stream, post):
    replica, (images,) = make_replica(timeline=False), stream(0, 1)
    with Client(replica.url) as client:
        client.predict("cam", images)
        with pytest.raises(TimelineOffError):
            client.timeline("cam")
