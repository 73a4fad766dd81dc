import re
import subprocess
from pathlib import Path

import pytest
import yaml

from acclimate_service.settings import Settings
from acclimate_service.state.errors import StoreUnfit

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


@pytest.fixture(scope="module")
def validate(program):
    """Compare a file with the specification of Compose."""
    command = [program("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    return lambda path: subprocess.run([*command, path], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml", "compose.cluster.yaml", "compose.keys.yaml"])
def test_the_file_obeys_the_compose_specification(validate, name):
    verdict = validate(DEPLOY / name)
    assert verdict.returncode == 0, verdict.stdout


def test_a_misspelt_key_is_against_the_compose_specification(validate, tmp_path):
    spoiled = (DEPLOY / "compose.yaml").read_text().replace("depends_on:", "depend_on:")
    (tmp_path / "compose.yaml").write_text(spoiled)
    assert "depend_on" in validate(tmp_path / "compose.yaml").stdout


def test_the_replicas_differ_only_in_their_address(services):
    first, second = (services[name] | {"networks": None} for name in ("acclimate-1", "acclimate-2"))
    assert first == second


def test_nginx_balances_exactly_the_replicas(services):
    addresses = [
        one["networks"]["backend"]["ipv4_address"] for name, one in services.items() if name.startswith("acclimate-")
    ]
    balanced = re.findall(r"^\s*server ([\d.]+):8000 ", (DEPLOY / "nginx.conf").read_text(), re.MULTILINE)
    assert balanced == addresses


def test_every_service_waits_until_those_it_needs_are_healthy(services):
    waits = {name: one.get("depends_on", {}) for name, one in services.items()}
    healthy = {"condition": "service_healthy"}
    assert waits.pop("redis") == {}
    assert waits.pop("nginx") == {"acclimate-1": healthy, "acclimate-2": healthy}
    assert all(needs == {"redis": healthy} for needs in waits.values())


def test_every_variable_of_a_replica_is_a_setting(services):
    names = {name.removeprefix("ACCLIMATE_").lower() for name in services["acclimate-1"]["environment"]}
    assert names <= Settings.model_fields.keys()


def test_nobody_from_elsewhere_is_let_in_without_a_key(services):
    assert services["acclimate-1"]["environment"]["ACCLIMATE_ALLOW_ANONYMOUS"] == "true"
    published = {name: one["ports"] for name, one in services.items() if "ports" in one}
    assert published == {"nginx": ["127.0.0.1:8080:8080"]}


def test_with_keys_every_replica_reads_those_of_a_folder_that_can_change():
    keyed = yaml.safe_load((DEPLOY / "compose.keys.yaml").read_text())["services"]
    assert keyed.keys() == {"acclimate-1", "acclimate-2"}
    for one in keyed.values():
        settings = {name.removeprefix("ACCLIMATE_").lower(): value for name, value in one["environment"].items()}
        assert not Settings(**settings).allow_anonymous
        assert one["volumes"] == [f"./keys:{Path(settings['keys_file']).parent}:ro"]


def test_a_replica_may_drain_finish_its_batches_and_write_its_snapshots_before_it_is_killed(services):
    grace = int(services["acclimate-1"]["stop_grace_period"].removesuffix("s"))
    settings = Settings(redis_url=services["acclimate-1"]["environment"]["ACCLIMATE_REDIS_URL"])
    assert grace > settings.lead_s + settings.grace_s + settings.drain_budget_s


async def test_the_service_entrusts_its_states_to_a_redis_started_as_the_composition_does(services, entrust):
    facts = await entrust(services["redis"]["command"])
    assert facts.aof_enabled
    assert facts.maxmemory_policy == "noeviction"
    assert facts.durability == "everysec"


def test_the_memory_of_redis_is_bounded(services):
    command = services["redis"]["command"]
    assert command[command.index("--maxmemory") + 1] == "2gb"


async def test_the_service_refuses_a_redis_without_the_append_only_file(services, entrust):
    command = ["no" if argument == "yes" else argument for argument in services["redis"]["command"]]
    with pytest.raises(StoreUnfit, match="append-only file"):
        await entrust(command)
