"""`/openapi.json` says what is accepted and what comes back: Schemathesis asks thousands of requests by it."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

HOOKS = Path(__file__).with_name("schemathesis_hooks.py")
PHASES = ("examples", "coverage", "fuzzing", "stateful")


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_every_route_is_as_the_document_says(replica: Any, program: Any, tmp_path: Path, phase: str) -> None:
    config = tmp_path / "schemathesis.toml"
    config.write_text(f'hooks = "{HOOKS}"\n')
    # one check is replaced by `refused_only_for_its_content`
    command = [program("st"), "--config-file", str(config), "run", f"{replica.url}/openapi.json", "--phases", phase]
    command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance", "--continue-on-failure"]
    command += ["--max-examples", "25", "--no-color", "--exclude-path-regex", "/timeline/live$"]  # which does not end
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=900, check=False)
    said = done.stdout.decode(errors="replace")
    assert done.returncode == 0, said
    assert int(re.findall(r"(\d+) generated", said)[-1]) > 10, said
