"""`acclimate clients` on a running service: what it prints, writes and removes, and how it ends."""

import json
import os
from pathlib import Path

import pytest

from acclimate_adapters import State
from acclimate_service import client_commands
from acclimate_service.cli import main
from acclimate_service.keys import create
from acclimate_service.remote import Remote


@pytest.fixture
def served(make_replica, stream):
    """Three clients, of which one has another adapter."""
    replica = make_replica()
    with replica.sdk() as sdk:
        sdk.configure("odd~one", "fedcal")
        for name in ("cam-1", "cam-2", "odd~one"):
            sdk.predict(name, stream(0, 1, 2)[0])
    return replica


@pytest.fixture
def command(served, capsys):
    """Run `acclimate clients` on the service; its exit status, what it prints, and what it says of failures."""

    def run(*words, url=served.url):
        code = main(["clients", *words, "--url", url])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def test_clients_are_listed_as_a_table_and_as_json(command, served):
    code, out, err = command("list")
    assert (code, err) == (0, "")
    head, *rows = out.splitlines()
    assert head.split() == ["client", "adapter", "adaptation", "version", "bytes", "changed", "verdict"]
    assert sorted(row.split()[0] for row in rows) == ["cam-1", "cam-2", "odd~one"]
    code, out, _ = command("list", "--json", "--adapter", "fedcal", "--model", "fashion-cnn")
    with served.sdk() as sdk:
        (listed,) = sdk.clients(adapter="fedcal").clients
    (row,) = map(json.loads, out.splitlines())
    assert (row["client_id"], row["adapter"], row["version"]) == (listed.client_id, "fedcal", listed.version)
    assert command("list", "--json", "--active-since", "2099-01-01T00:00:00Z") == (0, "", "")


def test_a_client_is_shown(command, served):
    document = json.loads(command("show", "cam-1", "--json")[1])
    assert document == {**served.http.get("/clients/cam-1").json(), "state": document["state"]}
    code, out, _ = command("show", "cam-1")
    shown = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (code, shown["client_id"], shown["state.version"], shown["state.kept"]) == (0, "cam-1", "1", "-")


def test_states_are_exported_that_can_be_imported_again(command, served, tmp_path):
    folder = tmp_path / "a" / "b"
    code, out, _ = command("export", "--all", "--to", str(folder))
    assert (code, out) == (0, "acclimate: 3 clients exported\n")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert files.keys() == {f"{name}.safetensors" for name in ("cam-1", "cam-2", "odd~one")}
    assert State.from_bytes(files["odd~one.safetensors"]).adapter == "fedcal"
    with served.sdk() as sdk:
        assert sdk.import_state("copy", files["cam-1.safetensors"]).state.committed is True
    code, out, _ = command("export", "cam-2", "--json", "--to", str(tmp_path))
    told = json.loads(out)
    assert Path(told["file"]).read_bytes() == files["cam-2.safetensors"]
    assert told == {
        "client_id": "cam-2",
        "file": told["file"],
        "bytes": len(files["cam-2.safetensors"]),
        "exported": True,
    }


def test_named_clients_are_deleted_and_then_all_that_fit(command):
    assert command("delete", "cam-1") == (0, "acclimate: 1 client deleted\n", "")
    assert command("delete", "--all", "--adapter", "fedcal", "--yes", "--json")[:2] == (
        0,
        '{"client_id":"odd~one","deleted":true}\n',
    )
    left = [json.loads(line)["client_id"] for line in command("list", "--json")[1].splitlines()]
    assert left == ["cam-2"]


@pytest.mark.parametrize(("said", "left"), [("y\n", 1), ("\n", 3)])
def test_whoever_is_at_a_terminal_is_asked_before_many_are_deleted(command, monkeypatch, said, left):
    terminal, own_end = os.openpty()
    os.write(terminal, said.encode())
    with os.fdopen(own_end) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        code, out, err = command("delete", "--all", "--adapter", "atp")
    os.close(terminal)
    assert "delete 2 clients of http://127.0.0.1" in out
    assert (code, "nothing was deleted" in err) == ((0, False) if left == 1 else (2, True))
    assert len(command("list", "--json")[1].splitlines()) == left


def test_an_export_that_broke_off_goes_on_where_it_did(command, served, tmp_path, monkeypatch, stream):
    with served.sdk() as sdk:
        for number in range(20):
            sdk.predict(f"more-{number}", stream(0, 1, 2)[0])
    monkeypatch.setattr(client_commands, "_STATES", 10)
    lines, asked = Remote.lines, []

    def breaking(remote, path, **query):
        asked.append(query["cursor"])
        found = list(lines(remote, path, **query))
        return iter(found if len(asked) == 1 else found[:2])

    monkeypatch.setattr(Remote, "lines", breaking)
    code, out, err = command("export", "--all", "--to", str(tmp_path))
    assert (code, out) == (2, "")
    assert f"the service broke off; to go on there, add --cursor {asked[1]}" in err
    monkeypatch.setattr(Remote, "lines", lines)
    assert command("export", "--all", "--to", str(tmp_path), "--cursor", asked[1])[0] == 0
    assert len(list(tmp_path.glob("*.safetensors"))) == 23


def test_what_is_refused_is_said_and_the_rest_is_done(command, tmp_path):
    code, out, err = command("export", "nobody", "cam-1", "--to", str(tmp_path))
    assert (code, out) == (1, "acclimate: 1 client exported\n")
    assert "nobody: " in err
    assert "answers 404: there is no client 'nobody'" in err
    assert [file.name for file in tmp_path.glob("*") if file.is_file()] == ["cam-1.safetensors"]
    assert command("show", "nobody")[0] == 1
    assert command("delete", "cam-1/state", "cam-1")[0] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["delete"], "name clients, or say --all"),
        (["export", "cam-1", "--all"], "name clients, or say --all"),
        (["delete", "--all"], "say --yes if that is meant"),
        (["list", "--active-since", "yesterday"], "answers 422: active_since"),
        (["list", "--model", "other"], "answers 404"),
        (["list", "--key-file", "/nowhere"], "the file of the key cannot be read"),
        (["export", "cam-1", "--to", "/proc/nowhere"], "/proc/nowhere cannot be made"),
    ],
)
def test_what_cannot_be_done_changes_nothing(command, words, said):
    code, out, err = command(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(command("list", "--json")[1].splitlines()) == 3


def test_where_no_service_answers_it_is_said(command, served):
    code, _, err = command("list", url="http://127.0.0.1:9")
    assert code == 2
    assert "no service answers at http://127.0.0.1:9" in err
    code, _, err = command("list", url=f"{served.url}/docs")
    assert (code, "answers 404" in err) == (2, True)


def test_a_key_is_read_from_its_file(run_service, tmp_path, stream, capsys):
    key, line = create("acme", ["predict", "read"])
    (tmp_path / "keys").write_text(line)
    (tmp_path / "key").write_text(f"{key}\n")
    with run_service(keys_file=tmp_path / "keys", data_dir=tmp_path / "data") as replica:
        with replica.sdk(api_key=key) as sdk:
            sdk.predict("cam", stream(0, 1, 2)[0])
        asked = ["--url", replica.url, "--json", "--key-file", str(tmp_path / "key")]
        assert main(["clients", "list", *asked]) == 0
        assert json.loads(capsys.readouterr().out)["client_id"] == "cam"
        assert main(["clients", "delete", "cam", *asked]) == 1
        assert "answers 403" in capsys.readouterr().err
        assert main(["clients", "list", "--url", replica.url]) == 2
        assert "answers 401" in capsys.readouterr().err
