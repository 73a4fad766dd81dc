"""Callers in browsers: what pages of other sites send is refused, and names that are not the service's own."""

import socket
from urllib.parse import urlsplit

import numpy as np
import pytest
from starlette.responses import PlainTextResponse

from acclimate_service.errors import Problem
from acclimate_service.http.middleware import SiteMiddleware, hosts_of
from acclimate_service.settings import SettingsError, read_settings

IMAGES = np.full((1, 28, 28), 7, np.uint8)
RAW = {"Content-Type": "application/octet-stream", "X-Tensor-Shape": "1,28,28"}
FOREIGN = {
    "a page of another site": {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
    "a form of another site": {"Origin": "http://evil.example"},
    "a sandboxed page": {"Origin": "null"},
    "another port of this machine": {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:1"},
    "a picture on a page of another site": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
}


@pytest.mark.parametrize("page", FOREIGN)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/predict"),
        ("POST", "/reset"),
        ("POST", "/enroll"),
        ("POST", "/feedback"),
        ("GET", ""),
        ("GET", "/state"),
        ("DELETE", ""),
    ],
)
def test_what_a_page_of_another_site_sends_is_refused(replica, assert_problem, page, method, path):
    request = {"content": IMAGES.tobytes(), "headers": {**RAW, **FOREIGN[page]}}
    reply = replica.http.request(method, f"/clients/page{path}", **request)
    assert_problem(reply, 403, "origin_not_allowed")
    assert replica.keys("page") == {}


def test_pages_of_the_service_itself_and_other_programs_are_answered(replica):
    own = replica.url.removeprefix("http://")
    for headers in ({}, {"Origin": f"http://{own}", "Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
        assert replica.http.get("/models", headers=headers).status_code == 200


def test_a_link_on_another_site_leads_to_the_service(replica):
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert replica.http.get("/docs", headers=link).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "10.0.0.1", ""]
)
def test_a_name_that_is_not_the_machines_own_is_refused(replica, assert_problem, host):
    assert_problem(replica.http.get("/models", headers={"Host": host}), 421, "host_not_allowed")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "localhost.", "a.localhost", "127.0.0.1", "[::1]:8000"]
)
def test_names_of_the_machine_itself_are_answered(replica, host):
    assert replica.http.get("/models", headers={"Host": host}).status_code == 200


def test_two_hosts_are_no_host(replica):
    address = urlsplit(replica.url)
    with socket.create_connection((address.hostname, address.port)) as caller:
        caller.sendall(b"GET /models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        reply = caller.recv(10_000)
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert b"malformed_request" in reply


def test_origins_that_are_allowed_may_use_the_service(make_replica, post, assert_problem):
    replica = make_replica(cors_origins=("https://app.example",))
    page = {"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}
    reply = post(replica, "cam", IMAGES, **page)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    asked = {**page, "Access-Control-Request-Method": "PUT", "Access-Control-Request-Headers": "idempotency-key"}
    preflight = replica.http.options("/clients/cam", headers=asked)
    assert preflight.status_code == 200
    assert "PUT" in preflight.headers["access-control-allow-methods"]
    assert_problem(post(replica, "cam", IMAGES, Origin="https://evil.example"), 403, "origin_not_allowed")


async def answered(hosts, headers, origins=()):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "headers": [(k.encode(), v.encode()) for k, v in headers.items()]}
    try:
        await SiteMiddleware(PlainTextResponse("ok"), hosts, origins)(scope, None, send)
    except Problem as problem:
        return problem.code
    return sent[0]["status"]


@pytest.mark.parametrize(
    ("hosts", "host", "outcome"),
    [
        (("acclimate.example",), "acclimate.example:8443", 200),
        (("acclimate.example",), "ACCLIMATE.example.", 200),
        (("acclimate.example",), "localhost", "host_not_allowed"),
        (("*.internal",), "a.internal", 200),
        (("*.internal",), "internal", "host_not_allowed"),
        (("*",), "anything", 200),
        ((), "localhost", 200),
    ],
)
async def test_the_setting_names_the_hosts_that_are_answered(hosts, host, outcome):
    assert await answered(hosts, {"host": host}) == outcome


async def test_an_origin_is_the_services_own_whatever_stands_for_the_usual_port():
    own = {"host": "acclimate.example", "origin": "https://acclimate.example:443"}
    assert await answered(("*",), own) == 200
    assert await answered(("*",), own | {"origin": "https://acclimate.example:444"}) == "origin_not_allowed"
    assert await answered(("*",), own | {"origin": "https://any"}, origins=("*",)) == 200


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CORS_ORIGINS", '["https://app.example/"]'),
        ("CORS_ORIGINS", '["app.example"]'),
        ("CORS_ORIGINS", '["https://APP.example"]'),
        ("ALLOWED_HOSTS", '["http://acclimate.example"]'),
        ("ALLOWED_HOSTS", '["acclimate.example:8000"]'),
        ("ALLOWED_HOSTS", "acclimate.example"),
    ],
)
def test_what_no_browser_would_send_is_no_setting(monkeypatch, variable, value):
    monkeypatch.setenv(f"ACCLIMATE_{variable}", value)
    with pytest.raises(SettingsError, match=f"ACCLIMATE_{variable}"):
        read_settings()


@pytest.mark.parametrize(
    ("address", "hosts"), [("127.0.0.1", ()), ("::1", ()), ("localhost", ()), ("0.0.0.0", ("*",)), ("::", ("*",))]
)
def test_a_service_of_this_machine_alone_answers_to_names_of_this_machine_alone(address, hosts):
    assert hosts_of((), address) == hosts
    assert hosts_of(("named",), address) == ("named",)
