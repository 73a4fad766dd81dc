"""The file of API keys: what it holds, what is refused, and how a key is found in it."""

import asyncio
import re
from hashlib import sha256

import pytest

from acclimate_service import keys
from acclimate_service.cli import main
from acclimate_service.keys import ANY_KEY, ANYBODY, Keys, KeysError, create
from acclimate_service.metrics import Metrics

DIGEST = "0" * 64


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys"


def test_a_key_is_known_by_its_line(file):
    key, line = create("acme", ["predict", "read"])
    file.write_text(f"# comment\n\n{line}  # of the cameras\n")
    caller = Keys(file).caller(key)
    assert caller.tenant == "acme"
    assert caller.rights == {"predict", "read", ANY_KEY, ANYBODY}
    assert caller.key in key


def test_the_file_holds_no_key(file):
    key, line = create("acme", ["predict"])
    assert line.split() == [key.split("_")[1], "acme", "predict", sha256(key.encode()).hexdigest()]
    assert key.split("_", 2)[2] not in line


def test_several_keys_of_a_tenant_are_valid_at_once(file):
    made = [create("acme", ["read"]) for _ in range(3)]
    file.write_text("\n".join(line for _, line in made))
    found = Keys(file)
    assert {found.caller(key).tenant for key, _ in made} == {"acme"}


@pytest.mark.parametrize(
    "other",
    [
        lambda key: key[:-1],
        lambda key: key + "A",
        lambda key: key.replace("acclimate_", "acclimate-"),
        lambda key: "acclimate_00000000_" + key.rpartition("_")[2],
        lambda key: key.split("_")[1],
        lambda key: "",
        lambda key: "é",
    ],
)
def test_no_other_text_is_a_key(file, other):
    key, line = create("acme", ["read"])
    file.write_text(line)
    assert Keys(file).caller(other(key)) is None


def test_an_unknown_id_is_compared_as_a_wrong_secret_is(file, monkeypatch):
    key, line = create("acme", ["read"])
    file.write_text(line)
    found, compared = Keys(file), []
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda one, other: compared.append((len(one), len(other))))
    for text in (key, f"{key}x", "acclimate_00000000_x"):
        found.caller(text)
    assert compared == [(32, 32)] * 3


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"00000000 acme read {DIGEST}\n00000000 acme read {DIGEST}", "line 2: the id 00000000 is there twice"),
        ("acclimate_00000000_secret", "line 1: expected are an id"),
        (f"00000000 acme read {DIGEST[:-1]}", "line 1: expected"),
        (f"xyz acme read {DIGEST}", "line 1: expected"),
        (f"00000000 {'a' * 65} read {DIGEST}", "line 1: a tenant is 1 to 64"),
        (f"00000000 a/b read {DIGEST}", "line 1: a tenant"),
        (f"00000000 acme read,fly {DIGEST}", "line 1: scopes are a comma list of predict, read, write, admin"),
        (f"00000000 acme , {DIGEST}", "line 1: scopes"),
    ],
)
def test_a_line_that_is_wrong_is_named_and_not_repeated(file, line, says):
    file.write_text(line)
    with pytest.raises(KeysError) as caught:
        Keys(file)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_said(file):
    with pytest.raises(KeysError, match="No such file"):
        Keys(file)
    file.write_bytes(b"\xff")
    with pytest.raises(KeysError, match="no text in UTF-8"):
        Keys(file)


def test_a_tenant_of_the_longest_name_is_taken(file):
    key, line = create("a" * 64, ["read"])
    file.write_text(line)
    assert Keys(file).caller(key)


def test_a_file_that_changes_is_read_again_and_one_that_is_broken_changes_nothing(file):
    (one, first), (two, second) = create("one", ["read"]), create("two", ["read"])
    file.write_text(first)
    found = Keys(file)
    file.write_text(f"{first}\n{second}")
    found.reload()
    assert found.caller(two).tenant == "two"
    for broken in ("nonsense", None):
        file.write_text(broken) if broken else file.unlink()
        with pytest.raises(KeysError):
            found.reload()
        assert found.caller(one).tenant == "one"
    file.write_text("")
    found.reload()
    assert found.caller(one) is None


async def test_the_file_is_followed_and_what_is_wrong_with_it_is_shown(file, monkeypatch):
    monkeypatch.setattr(keys, "LOOK_S", 0)
    file.write_text("")
    found, background = Keys(file), Metrics().background
    following = asyncio.create_task(found.follow(background.run))

    async def until(condition):
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - the file is looked at, and nobody is told
                await asyncio.sleep(0.001)

    file.write_text("nonsense, and longer")
    await until(lambda: "keys" in background.failing)
    key, line = create("one", ["read"])
    file.write_text(line)
    await until(lambda: found.caller(key))
    await until(lambda: not background.failing)
    following.cancel()


def test_the_command_prints_a_key_and_its_line(capsys, file):
    assert main(["keys", "create", "--tenant", "acme", "--scope", "predict,read"]) == 0
    key, line = re.findall(r": +(.+)$", capsys.readouterr().out, re.MULTILINE)
    file.write_text(line)
    assert Keys(file).caller(key).tenant == "acme"


@pytest.mark.parametrize(("tenant", "scope"), [("a/b", "read"), ("acme", "fly"), ("", "read"), ("acme", "")])
def test_the_command_makes_no_key_that_the_service_would_refuse(capsys, tenant, scope):
    assert main(["keys", "create", "--tenant", tenant, "--scope", scope]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("acclimate: ")
