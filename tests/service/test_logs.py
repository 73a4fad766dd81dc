"""What stands in the log of a service, as text and as JSON: requests by their ids, and no client or key by its name."""

import json
import logging
import sys

import pytest

from acclimate_client.errors import ProblemError
from acclimate_service.keys import create
from acclimate_service.logs import JsonLines, set_up


def record(message, *args, **fields):
    made = logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, message, args, None, extra=fields)
    return json.loads(JsonLines().format(made))


def test_a_line_has_what_was_logged_and_all_that_came_with_it():
    line = record("%s of %d", "one", 2, request_id="9f", status=200)
    assert (line["level"], line["logger"], line["message"]) == ("info", "x", "one of 2")
    assert (line["request_id"], line["status"]) == ("9f", 200)
    assert line.keys() == {"time", "level", "logger", "message", "request_id", "status"}


def test_a_traceback_is_part_of_its_line():
    try:
        raise ZeroDivisionError("why")
    except ZeroDivisionError:
        made = logging.getLogger("x").makeRecord("x", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    text = JsonLines().format(made)
    assert "\n" not in text
    assert "ZeroDivisionError: why" in json.loads(text)["exception"]


def test_what_json_does_not_know_is_written_as_text():
    assert record("x", thing={1, 2})["thing"] == "{1, 2}"


@pytest.mark.parametrize(("form", "level"), [("text", "info"), ("json", "warning")])
def test_the_log_is_written_as_the_settings_say(capsys, form, level):
    kept = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        set_up(form, level)
        logging.getLogger("x").info("an information")
        logging.getLogger("x").warning("a warning")
    finally:
        logging.getLogger().handlers[:] = kept[0]
        logging.getLogger().setLevel(kept[1])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (2 if level == "info" else 1)
    assert (lines[-1].startswith("{")) == (form == "json")
    assert "a warning" in lines[-1]


def test_each_request_has_a_line_by_which_it_is_found(run_service, tmp_path, stream, caplog):
    caplog.set_level(logging.INFO, "acclimate.access")
    (key, line), (images,) = create("acme", ["predict"]), stream(0, 1, 2)
    (tmp_path / "keys").write_text(line)
    with run_service(keys_file=tmp_path / "keys", data_dir=tmp_path / "data") as replica:
        with replica.sdk(api_key=key, headers={"X-Request-Id": "trace-1"}) as client:
            answered = client.predict("secretive", images)
            with pytest.raises(ProblemError) as refused:
                client.reset("secretive")
        found = {each.request_id: each for each in caplog.records if each.name == "acclimate.access"}
        told = found[answered.request_id]
        assert (told.method, told.route, told.status) == ("POST", "/clients/{client_id}/predict", 200)
        assert (told.caller_request_id, told.tenant, told.key) == ("trace-1", "acme", key.split("_")[1])
        assert told.milliseconds > 0
        assert found[refused.value.request_id].status == 403
        assert found[refused.value.request_id].client == told.client
    assert "secretive" not in caplog.text
    assert key.split("_", 2)[2] not in caplog.text


def test_by_default_only_failures_of_the_service_are_written(run_service, tmp_path, stream, caplog):
    caplog.set_level(logging.WARNING)
    (images,) = stream(0, 1, 2)
    with run_service(data_dir=tmp_path / "data") as replica, replica.sdk() as client:
        client.predict("a", images)
        assert not [each for each in caplog.records if each.name == "acclimate.access"]
        replica.redis.config_set("maxmemory", 1)
        with pytest.raises(ProblemError) as refused:
            client.predict("a", images)
        replica.redis.config_set("maxmemory", 0)
        (told,) = (each for each in caplog.records if each.name == "acclimate.access")
        assert (told.status, told.request_id, told.levelname) == (507, refused.value.request_id, "WARNING")
