"""The examples of the README run."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "clients_sdk" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_readme_has_examples():
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_example_runs_against_a_server(server, example, capsys):
    assert "http://127.0.0.1:8000" in example
    exec(compile(example.replace("http://127.0.0.1:8000", server.url), str(README), "exec"), {})
    assert server.requests
