import pytest

from acclimate_service.state import ClientScope, Limits, fingerprint, new_id, random_rid


@pytest.mark.parametrize("name", ["", "-a", "a" * 129, "a/", "/b", "a/b/c", "a{b", "a}b", "a b", "ä", "a\n"])
def test_an_id_that_could_break_a_key_is_refused(name: str):
    with pytest.raises(ValueError, match="accepted are 1 to 128"):
        ClientScope(name)
    with pytest.raises(ValueError, match="tenant"):
        ClientScope("cam-7", tenant=name)


def test_every_key_carries_tenant_and_client_as_its_hash_tag():
    client = ClientScope("cam-7", tenant="acme")
    assert client.registry == "acc:{acme/cam-7}:r"
    assert client.head("0123456789abcdef") == "acc:{acme/cam-7}:0123456789abcdef:h"
    assert client.snapshot("0123456789abcdef", "") == "acc:{acme/cam-7}:0123456789abcdef:s:-"


@pytest.mark.parametrize("model", ["", "0123", "0123456789ABCDEF", "0123456789abcdef0"])
def test_a_model_scope_is_a_content_hash(model: str):
    with pytest.raises(ValueError, match="16 lower-case hex digits"):
        ClientScope("cam-7").head(model)


def test_a_request_id_depends_on_tenant_client_and_key():
    rids = {ClientScope(c, tenant=t).rid(k) for c in ("a", "ab") for t in ("a", "ba") for k in ("k", "bk")}
    assert len(rids) == 8
    assert {len(rid) for rid in rids} == {32}
    assert ClientScope("a").rid("k") == ClientScope("a").rid("k")


def test_a_fingerprint_tells_apart_what_only_concatenates_to_the_same():
    assert fingerprint(b"secret", b"ab", b"c") != fingerprint(b"secret", b"a", b"bc")
    assert fingerprint(b"secret", b"ab") != fingerprint(b"other", b"ab")
    assert fingerprint(b"secret", b"ab") == fingerprint(b"secret", b"ab")
    assert len(fingerprint(b"secret")) == 32


def test_random_ids_do_not_repeat():
    assert len({new_id() for _ in range(1000)}) == 1000
    assert len({random_rid() for _ in range(1000)}) == 1000
    assert (len(new_id()), len(random_rid())) == (16, 32)


def test_limits_outlive_each_other_in_the_right_order():
    limits = Limits()
    assert limits.tombstone_ttl_ms > limits.key_ttl_ms > limits.key_min_ms
    with pytest.raises(ValueError, match="key_min_ms"):
        Limits(key_ttl_ms=1000, key_min_ms=1001)
    with pytest.raises(ValueError, match="inline_max is 0"):
        Limits(inline_max=0)
