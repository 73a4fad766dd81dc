"""A service that a proxy shows below a path: it answers with that path and without it, and says where it is."""

import re

import pytest

from acclimate_service.keys import create


@pytest.fixture(scope="module")
def below(run_service, tmp_path_factory):
    """Below `/vision/acclimate`, with keys."""
    folder = tmp_path_factory.mktemp("below")
    key, line = create("acme", ["predict", "read"])
    (folder / "keys").write_text(line)
    settings = {"root_path": "/vision/acclimate", "keys_file": folder / "keys", "data_dir": folder / "data"}
    with run_service(**settings) as replica:
        yield replica, {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("prefix", ["", "/vision/acclimate"])
def test_it_is_the_same_whether_or_not_the_proxy_takes_the_path_off(below, stream, prefix):
    replica, key = below
    http, (images,) = replica.http, stream(0, 1, 2)
    headers = {**key, "Content-Type": "application/octet-stream", "X-Tensor-Shape": "2,1,28,28"}
    reply = http.post(f"{prefix}/clients/cam{len(prefix)}/predict", content=images.tobytes(), headers=headers)
    assert (reply.status_code, reply.json()["client_id"]) == (200, f"cam{len(prefix)}")
    assert http.get(f"{prefix}/v2/health/ready").status_code == 200, "probes need no key"
    assert http.get(f"{prefix}/models").status_code == 401
    assert http.get(f"{prefix}/nowhere", headers=key).status_code == 404
    assert "frame-ancestors" not in http.get(f"{prefix}/docs").headers.get("content-security-policy", "")


def test_the_page_and_its_description_lead_back_through_the_proxy(below):
    http = below[0].http
    page = http.get("/vision/acclimate/docs").text
    names = re.findall(r"""(?:href|src)="([^"]+)"|url: '([^']+)'""", page)
    for name in {one or other for one, other in names}:
        assert not name.startswith(("/", "http")), "it is found next to the page, wherever that is"
        assert http.get(f"/vision/acclimate/{name}").status_code == 200
    assert http.get("/openapi.json").json()["servers"] == [{"url": "/vision/acclimate"}]


def test_another_path_is_no_prefix(below):
    replica, key = below
    for path in ("/vision/acclimates/models", "/vision/models", "/vision/acclimatemodels"):
        assert replica.http.get(path, headers=key).status_code == 404


def test_without_one_nothing_is_said_of_servers(replica):
    assert "servers" not in replica.http.get("/openapi.json").json()
