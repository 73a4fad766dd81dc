"""The middleware around applications of its own, driven by plain ASGI calls."""

import json
from types import SimpleNamespace

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from acclimate_service.http.middleware import RequestMiddleware
from acclimate_service.metrics import Metrics


async def call(app, metrics, headers=(), path="/x"):
    """Status, headers and body of one request."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": list(headers), "query_string": b""}
    await RequestMiddleware(app, SimpleNamespace(metrics=metrics, draining=False))(scope, receive, send)
    start, *bodies = sent
    return start["status"], dict(start["headers"]), b"".join(body["body"] for body in bodies)


@pytest.fixture
def metrics():
    return Metrics()


def counted(metrics, route, status):
    labels = {"method": "GET", "model": "", "route": route, "status": status}
    return metrics.registry.get_sample_value("acclimate_requests_total", labels)


async def test_a_reply_carries_the_request_id_of_the_caller_beside_its_own(metrics):
    _, headers, _ = await call(PlainTextResponse("ok"), metrics, [(b"x-request-id", b"trace-1")])
    assert headers[b"x-caller-request-id"] == b"trace-1"
    assert len(headers[b"x-request-id"]) == 32


@pytest.mark.parametrize("bad", [b"a b", b"x" * 129, b"", b"a\nb", "é".encode("latin-1"), b"a/b"])
async def test_an_unsound_request_id_is_dropped(metrics, bad):
    _, headers, _ = await call(PlainTextResponse("ok"), metrics, [(b"x-request-id", bad)])
    assert b"x-caller-request-id" not in headers
    assert len(headers[b"x-request-id"]) == 32


async def test_every_request_gets_an_id_of_its_own(metrics):
    ids = {(await call(PlainTextResponse("ok"), metrics))[1][b"x-request-id"] for _ in range(3)}
    assert len(ids) == 3


async def test_a_failure_becomes_a_problem_with_the_request_id_and_is_logged(metrics, caplog):
    async def fail(scope, receive, send):
        raise ZeroDivisionError("a secret of the house")

    status, headers, body = await call(fail, metrics, [(b"x-request-id", b"trace-2")])
    assert status == 500
    assert headers[b"x-caller-request-id"] == b"trace-2"
    problem = json.loads(body)
    assert (problem["code"], problem["request_id"]) == ("internal", headers[b"x-request-id"].decode())
    assert problem["state_committed"] == "unknown"
    assert b"secret" not in body
    assert "(of its caller trace-2) failed" in caplog.text
    assert "a secret of the house" in caplog.text
    assert counted(metrics, "unknown", "500") == 1


async def test_a_failure_after_the_reply_began_is_not_answered_twice(metrics):
    async def fail_late(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await call(fail_late, metrics)


async def test_requests_are_counted_by_the_pattern_of_their_route(metrics):
    async def routed(scope, receive, send):
        scope["route"] = Route("/clients/{client_id}", PlainTextResponse("ok"))
        await PlainTextResponse("ok", 201)(scope, receive, send)

    await call(routed, metrics, path="/clients/cam-7")
    assert counted(metrics, "/clients/{client_id}", "201") == 1
    assert b"cam-7" not in metrics.render("")[0]


async def test_other_protocols_pass_untouched(metrics):
    seen = []

    async def app(scope, receive, send):
        seen.append(scope)

    await RequestMiddleware(app, SimpleNamespace(metrics=metrics, draining=False))({"type": "lifespan"}, None, None)
    assert seen == [{"type": "lifespan"}]
