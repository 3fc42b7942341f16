"""The table of fields against Envoy's own descriptors."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mmd_workers.gateway.picker.ext_proc_messages import MESSAGES, ONE_OF

ENVOY = yaml.safe_load((Path(__file__).parents[1] / "envoy_fields.yaml").read_text())


@pytest.mark.parametrize("name", MESSAGES)
def test_every_field_has_the_number_and_the_type_that_envoy_gives_it(name: str):
    assert {field: (number, kind) for field, (number, kind, _) in ENVOY[name].items()} == MESSAGES[name]


@pytest.mark.parametrize("name", ONE_OF)
def test_alternatives_are_those_of_envoy(name: str):
    alternatives = {field for field, (_, _, one_of) in ENVOY[name].items() if one_of is not None}
    assert alternatives == ONE_OF[name]
