"""Every wrong setting is one clear line, and never a traceback."""

import socket

import pytest

from acclimate_service.cli import main
from acclimate_service.settings import SettingsError, read_settings


@pytest.fixture
def fails(monkeypatch, capsys, tmp_path, request):
    """Run `acclimate serve` with one variable, and return what it says."""

    def run(name, value):
        monkeypatch.setenv("ACCLIMATE_PORT", "0")
        monkeypatch.setenv("ACCLIMATE_MODEL_STORE", str(request.config.rootpath / "model_store" / "bundles"))
        monkeypatch.setenv("ACCLIMATE_DATA_DIR", str(tmp_path))
        monkeypatch.setenv(name, value)
        assert main(["serve"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("acclimate: ")
        assert err.count("\n") == 1, err
        return err

    return run


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ACCLIMATE_ADAPTER", "nope", "there is no adapter 'nope'; there are atp"),
        ("ACCLIMATE_ADAPTER", "fed_ade", "needs anchors"),
        ("ACCLIMATE_ADAPTER_OPTIONS", '{"mode": 5}', "use one of online, batch"),
        ("ACCLIMATE_ADAPTER_OPTIONS", '{"speed": 5}', "no hyper-parameter speed"),
        ("ACCLIMATE_ADAPTER_OPTIONS", "{bad", "must be JSON"),
        ("ACCLIMATE_ADAPTER_OPTIONS", "[1]", "valid dictionary"),
        ("ACCLIMATE_ALLOWED_IMPORTS", '["a:b", 5]', "valid string"),
        ("ACCLIMATE_PORT", "http", "valid integer"),
        ("ACCLIMATE_PORT", "65536", "less than or equal to 65535"),
        ("ACCLIMATE_HOST", "192.0.2.1", "make keys with `acclimate keys create`"),
        ("ACCLIMATE_KEYS_FILE", "/nowhere", "/nowhere cannot be read: No such file or directory"),
        ("ACCLIMATE_MODEL_STORE", "/nowhere", "there is no model store at /nowhere"),
        ("ACCLIMATE_MODEL", "nope", "there is no nope"),
        ("ACCLIMATE_MODEL", "../etc", "names no bundle"),
        ("ACCLIMATE_DATA_DIR", "/dev/null", "cannot be used: "),
        ("ACCLIMATE_REDIS_URL", "redis://127.0.0.1:1", "Redis does not answer"),
        ("ACCLIMATE_REDIS_URL", "http://redis", "redis://"),
        ("ACCLIMATE_REDIS_URL", "redis://127.0.0.1?nonsense=1", "nonsense"),
        ("ACCLIMATE_DEVICE", "tpu", "cpu|cuda"),
        ("ACCLIMATE_DEVICE", "cuda:99", "cuda:99 is not there"),
        ("ACCLIMATE_THREADS", "0", "greater than or equal to 1"),
        ("ACCLIMATE_STATE_TTL_S", "61", "accepted is more than 120000"),
        ("ACCLIMATE_TENANT", ".hidden", "should match pattern"),
        ("ACCLIMATE_MODLE", "x", "did you mean ACCLIMATE_MODEL?"),
        ("ACCLIMATE_XYZZY", "x", "no such setting"),
        ("ACCLIMATE_IMPORT", "perhaps", "ACCLIMATE_IMPORT: Input should be a valid boolean"),
        ("ACCLIMATE_IMPORT_", "false", "did you mean ACCLIMATE_IMPORT?"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(fails, name, value, says):
    said = fails(name, value)
    assert says in said
    assert name in said or name in ("ACCLIMATE_MODEL_STORE", "ACCLIMATE_MODEL", "ACCLIMATE_DATA_DIR") or "Redis" in said


def test_an_address_of_another_machine_is_one_clear_line(fails, monkeypatch):
    monkeypatch.setenv("ACCLIMATE_ALLOW_ANONYMOUS", "true")
    assert "cannot listen at 192.0.2.1" in fails("ACCLIMATE_HOST", "192.0.2.1")


def test_a_taken_port_is_one_clear_line(fails):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "Address already in use" in fails("ACCLIMATE_PORT", str(taken.getsockname()[1]))


def test_every_wrong_variable_has_its_line(monkeypatch):
    monkeypatch.setenv("ACCLIMATE_PORT", "x")
    monkeypatch.setenv("ACCLIMATE_MAX_IMAGES", "0")
    with pytest.raises(SettingsError) as caught:
        read_settings()
    lines = str(caught.value).splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == ["ACCLIMATE_MAX_IMAGES", "ACCLIMATE_PORT"]


def test_an_empty_variable_is_as_good_as_none(monkeypatch):
    monkeypatch.setenv("ACCLIMATE_REDIS_URL", "")
    monkeypatch.setenv("ACCLIMATE_PORT", "")
    assert (read_settings().redis_url, read_settings().port) == (None, 8000)


def test_settings_are_read_from_their_variables(monkeypatch):
    monkeypatch.setenv("ACCLIMATE_ADAPTER_OPTIONS", '{"mode": "batch"}')
    monkeypatch.setenv("ACCLIMATE_ALLOWED_IMPORTS", '["a:b"]')
    monkeypatch.setenv("ACCLIMATE_IMPORT", "false")
    settings = read_settings(port=7)
    assert (settings.adapter_options, settings.allowed_imports, settings.port) == ({"mode": "batch"}, ("a:b",), 7)
    assert settings.import_ is False


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["models", "list"], 0, "fashion-cnn/1  acclimate:shallow_cnn  10 classes  1x28x28"),
        (["models", "show", "fashion-cnn"], 0, '"architecture": "acclimate:shallow_cnn"'),
        (["models", "verify", "fashion-cnn/1"], 0, "fashion-cnn/1: ok"),
        (["models", "verify", "fashion-cnn/7"], 2, "there is no fashion-cnn/7"),
    ],
)
def test_models_are_listed_shown_and_verified(capsys, monkeypatch, request, arguments, status, says):
    monkeypatch.setenv("ACCLIMATE_MODEL_STORE", str(request.config.rootpath / "model_store" / "bundles"))
    assert main(arguments) == status
    assert says in "".join(capsys.readouterr())


@pytest.mark.parametrize("arguments", [[], ["nope"], ["serve", "--speed", "1"]])
def test_a_wrong_command_line_is_status_2_with_its_usage(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: acclimate" in capsys.readouterr().err
