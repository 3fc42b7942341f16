"""docs/rollouts.md lists steps, stages and conditions as the code does, in the order in which they apply."""

from __future__ import annotations

import re
from pathlib import Path

from mmd_operator.resources.sentences import sentence_of
from mmd_operator.rollout.next_step import STAGES, STEPS
from mmd_operator.status import conditions

PAGE = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text()
RULES = (
    *conditions.READY,
    *conditions.PROGRESSING,
    *conditions.DEGRADED,
    *conditions.STALLED,
    *conditions.POOL_READY,
    *conditions.SCALING_ACTIVE,
    *conditions.SCALING_LIMITED,
    *conditions.METRICS_FRESH,
    *conditions.ROUTE_ACCEPTED,
    *conditions.AUTHENTICATION_REQUIRED,
    *conditions.WEIGHTS_CACHED,
)


def column(title: str, number: int) -> list[str]:
    """Quoted names in a column of the table below a heading, its head aside."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [name for line in lines for name in re.findall(r"`([^`]+)`", line.split("|")[1 + number])]


def test_every_step_is_described_in_the_order_in_which_it_applies():
    assert column("Steps", 0) == [step.__name__ for step in STEPS]


def test_the_page_and_mmd_explain_have_the_same_words_for_each_step():
    section = PAGE.split("\n## Steps\n")[1].split("\n## ")[0]
    described = [
        line.split("|")[2].strip().replace("`", "") for line in section.splitlines() if line[:3] == "| `"
    ]
    assert described == [sentence_of(step) for step in STEPS]


def test_every_stage_is_described_in_the_order_of_evaluation():
    assert column("Stages", 0) == [stage for stage, _ in STAGES]
    assert column("Stages", 1) == [holds.__name__ for _, holds in STAGES]


def test_every_rule_of_a_condition_is_described_in_the_order_of_evaluation():
    assert column("Conditions", 1) == [rule.__name__ for rule in RULES]
