"""A reviewer sees every change of a manifest in these files. To accept one: `mmd render -f IN > OUT`."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mmd_api.cli import build

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
