"""Copied clients are clients: a service goes on with them, and their bytes are those that Redis holds."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from acclimate_bench.cost import clients

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("integration")]


def test_a_crowd_comes_back_from_redis_and_takes_a_little_more_than_its_states(
    bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(clients, "SAMPLE", 3)
    assert bench("clients", "--clients", "30", "--json", str(tmp_path / "told.json")) == 0
    few, held, many, compared = json.loads((tmp_path / "told.json").read_text()).values()
    assert (few[0]["name"], many[0]["name"]) == ("3 clients, one batch each",) * 2, "else somebody began anew"
    (each,) = held
    assert 42_000 < each["bytes of state"] < each["bytes in Redis"] < each["bytes of state"] + 30_000
    assert each["GB for a million"] == pytest.approx(each["bytes in Redis"] / 1000)
    assert many[0]["bytes to Redis"] == pytest.approx(few[0]["bytes to Redis"], rel=0.1)
    assert compared[0]["slower by"] == pytest.approx(many[0]["p50 ms"] / few[0]["p50 ms"] - 1)


def test_who_began_anew_is_no_client_that_came_back(bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "SAMPLE", 1)
    monkeypatch.setattr(clients, "copy", lambda *_: None)
    with pytest.raises(SystemExit, match=r"client-\d should have been restored from Redis, and is cold"):
        bench("clients", "--clients", "2")
