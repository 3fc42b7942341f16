"""A reviewer sees every change of a manifest in these files. To accept one: `mmd render -f IN > OUT`."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mmd_cli.program import build

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
CASES = {
    "demo": EXAMPLES / "demo.yaml",
    "monolithic": EXAMPLES / "monolithic.yaml",
    "gpu": EXAMPLES / "gpu.yaml",
    "everything": HERE / "golden" / "everything.in.yaml",
}


@pytest.mark.parametrize("case", CASES)
def test_a_deployment_renders_exactly_these_objects(case: str):
    result = CliRunner().invoke(build().app, ["render", "-f", str(CASES[case])])
    assert result.exit_code == 0, result.output
    expected = (HERE / "golden" / f"{case}.out.yaml").read_text()
    assert list(yaml.safe_load_all(result.stdout)) == list(yaml.safe_load_all(expected))
    assert result.stdout == expected


def test_programs_get_the_same_objects_as_one_list():
    said = CliRunner().invoke(build().app, ["render", "-f", str(CASES["demo"]), "--json"])
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert (found["apiVersion"], found["kind"]) == ("v1", "List")
    expected = (HERE / "golden" / "demo.out.yaml").read_text()
    assert found["items"] == list(yaml.safe_load_all(expected))
