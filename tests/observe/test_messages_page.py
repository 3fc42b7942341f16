"""docs/messages.md has every text that people may read: those of calls with a name under it, all others under their module."""

from __future__ import annotations

from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "messages.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")] for line in PAGE.splitlines() if line[:2] == "| "
]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("BringingUp", "starting revision ‹revision› next to ‹serving›: ‹"),
        ("Updating", "updating pods of revision ‹revision›"),
        ("Starting", "‹updated› updated"),
        ("AllReporting", "all pods report their load"),
        ("MaxReplicas", "raise autoscaling.maxReplicas of the pool"),
        ("ImageMoved", "‹"),
        ("ReconcileFailed", "reconciliation has failed since ‹since›"),
        ("DrainDeadlineExceeded", "did not finish draining within"),
        ("BacklogSeconds", "backlog is {observed:.2f} s"),
        ("AllReady", "‹ready› of ‹replicas› pods Ready"),
        ("mmd_operator/autoscaling/decision.py", "limited by ‹limits›"),
        ("mmd_operator/autoscaling/coordinate.py", "‹pool› is the bottleneck"),
        ("mmd_operator/gpu_share.py", "raise spec.gpuBudget to"),
        ("mmd_operator/replacement.py", "‹"),
        ("mmd_operator/autoscaling/signals.py", "no load report from pod ‹pod› for ‹…› s"),
        ("mmd_api/faults.py", "choose one of them"),
        ("mmd_cli/commands/explain.py", "mmd explain: ‹error›"),
        ("mmd_cli/commands/chat.py", "Audio file. Repeatable."),
        ("`spec.gpuBudget`", "GPU"),
        ("`status.pools.encoder.lastDecision.effects[].rule`", "Name of the rule."),
    ],
)  # fmt: skip
def test_a_text_that_people_may_read_is_on_the_page_under_its_name(name: str, words: str) -> None:
    assert any(name in row[0].split(" or ") and words in row[-1] for row in ROWS), f"{name}: {words}"


def test_the_page_names_the_reason_of_every_condition() -> None:
    names = {name for row in ROWS for name in row[0].split(" or ")}
    for reason in (
        "Serving", "Paused", "Complete", "RolloutStuck", "UnknownFields", "NoProblem", "AllReady",
        "ScaledToZero", "Shadow", "Active", "NotLimited", "MetricsMissing", "AllReporting", "WaitingForGpuBudget",
    ):  # fmt: skip
        assert reason in names, reason
