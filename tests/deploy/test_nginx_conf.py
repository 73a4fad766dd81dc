import re
import subprocess
from pathlib import Path

import pytest

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
    batch, state = (int(size) * 2**20 for size in re.findall(r"client_max_body_size (\d+)m;", conf))
    assert (batch, state) == (Settings().max_body_bytes, Settings().max_state_bytes)
    assert (value(conf, r"default (\d+);"), value(conf, r'state\$" (\d+);')) == (batch, state)


def test_nginx_outwaits_the_longest_request_so_that_the_service_says_what_became_of_it(conf):
    assert value(conf, r"proxy_read_timeout (\d+)s;") * 1000 > Settings().request_timeout_ms


def test_nginx_drops_what_was_idle_when_a_replica_began_to_drain_before_the_replica_ends(conf):
    assert value(conf, r"keepalive_timeout (\d+)s;") < Settings(redis_url="redis://redis").lead_s


def test_a_replica_that_came_back_is_asked_again_before_the_next_one_has_drained(conf):
    waits = value(conf, r"proxy_connect_timeout (\d+)s;"), *map(int, re.findall(r"fail_timeout=(\d+)s", conf))
    assert sum(set(waits)) < Settings(redis_url="redis://redis").lead_s


def test_nothing_asks_nginx_to_send_a_request_twice(conf):
    assert "non_idempotent" not in conf
