import re
import subprocess
from pathlib import Path

import pytest

from acclimate_service.cli import KEEP_ALIVE_S
from acclimate_service.settings import Settings

CONF = Path(__file__).parents[2] / "deploy/nginx.conf"


@pytest.fixture(scope="module")
def conf():
    return re.sub(r"#.*", "", CONF.read_text())


def value(conf, pattern):
    (found,) = re.findall(pattern, conf)
    return int(found)


def test_nginx_accepts_the_file_as_it_is_deployed(nginx, tmp_path):
    command = [nginx, "-t", "-e", "stderr", "-p", f"{tmp_path}/", "-c", str(CONF)]
    verdict = subprocess.run(command, capture_output=True, text=True, check=False)
    assert verdict.returncode == 0, verdict.stderr


def test_nginx_and_the_service_take_equally_large_bodies(conf):
    limit = Settings().max_body_bytes
    assert value(conf, r"client_max_body_size (\d+)m;") * 2**20 == limit
    assert f"may have {limit} bytes" in conf


def test_nginx_outwaits_the_longest_request_so_that_the_service_says_what_became_of_it(conf):
    assert value(conf, r"proxy_read_timeout (\d+)s;") * 1000 > Settings().request_timeout_ms


def test_nginx_drops_idle_connections_before_a_replica_closes_them(conf):
    assert value(conf, r"keepalive_timeout (\d+)s;") < KEEP_ALIVE_S


def test_nothing_asks_nginx_to_send_a_request_twice(conf):
    assert "non_idempotent" not in conf
