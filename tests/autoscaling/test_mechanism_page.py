"""docs/autoscaling-mechanism.md lists signals, rules and limits as the code does, in the order in which they apply."""

from __future__ import annotations

import re
from pathlib import Path

from mmd_operator.autoscaling import HARD_LIMITS, LIMITS, SIGNAL_METRICS
from mmd_operator.autoscaling.coordinate import COUPLING, share_gpu_budget
from mmd_operator.autoscaling.decide import REPORTS, RULES
from mmd_operator.resources.sentences import sentence_of

PAGE = (Path(__file__).parents[2] / "docs" / "autoscaling-mechanism.md").read_text()

TABLES = ("From a need to a size", "Fitting the pools to each other")


def rows(title: str) -> list[list[str]]:
    """Cells of the table below a heading, its head aside."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def plain(cell: str) -> str:
    return cell.replace("`", "")


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_signal_is_described_in_the_order_of_evaluation():
    assert [quoted(cells[0])[0] for cells in rows("From reports to a need")] == list(SIGNAL_METRICS)


def test_every_rule_is_described_in_the_order_in_which_it_applies():
    of_a_pool = [quoted(cells[0])[0] for cells in rows("From a need to a size")]
    assert of_a_pool == [rule.__name__ for rule in (*RULES, *REPORTS)]
    of_all = [quoted(cells[0])[0] for cells in rows("Fitting the pools to each other")]
    assert of_all == [rule.__name__ for rule in (*COUPLING, share_gpu_budget)]


def test_the_page_and_mmd_explain_have_the_same_words_for_each_rule():
    described = {quoted(cells[0])[0]: plain(cells[2]) for title in TABLES for cells in rows(title)}
    for rule in (*RULES, *REPORTS, *COUPLING, share_gpu_budget):
        assert described[rule.__name__] == sentence_of(rule)


def test_every_limit_belongs_to_a_rule():
    assert {limit for title in TABLES for cells in rows(title) for limit in quoted(cells[1])} == set(LIMITS)


def test_the_limits_that_waiting_does_not_lift_are_named():
    sentence = PAGE.split("\n`ScalingLimited` is `True`")[1].split(", where the load")[0]
    assert set(quoted(sentence)) == HARD_LIMITS
