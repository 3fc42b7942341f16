"""docs/messages.md has every text that people may read, under its name, its command or what composes it, and no text for programs."""

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
        ("MaxReplicas", "raise the pool's autoscaling.maxReplicas"),
        ("ImageMoved", "‹"),
        ("ReconcileFailed", "reconciliation has failed since ‹since›"),
        ("DrainDeadlineExceeded", "did not finish draining within"),
        ("BacklogSeconds", "backlog is {observed:.2f} s"),
        ("AllReady", "‹ready› of ‹replicas› ‹unit› Ready"),
        ("operator: autoscaling", "limited by ‹limits›"),
        ("operator: autoscaling", "‹pool› is the bottleneck"),
        ("operator: sizes", "raise spec.gpuBudget to"),
        ("operator: sizes", "no node takes pod ‹name›"),
        ("operator: autoscaling", "no load report from pod ‹pod› for ‹…› s"),
        ("resource: faults", "choose one of them"),
        ("`mmd explain`", "mmd explain: ‹error›"),
        ("`mmd chat`", "Audio file. Repeatable."),
        ("`mmd chat`", "Ask a question about text, images, video or audio"),
        ("`mmd up`", "liveness probe failed ‹failures› times in a row"),
        ("workers: kv", "the link was closed"),
        ("warning", "‹…› attempt ‹…› lost: ‹…›"),
        ("`spec.gpuBudget`", "GPU"),
        ("`status.pools.encoder.lastDecision.effects[].rule`", "Name of the rule."),
    ],
)  # fmt: skip
def test_a_text_for_people_is_on_the_page_under_its_name(name: str, words: str) -> None:
    assert any(name in row[0].split(" or ") and words in row[-1] for row in ROWS), f"{name}: {words}"


@pytest.mark.parametrize(
    "words",
    [
        "text/event-stream",
        "histogram_quantile(",
        "jetstream {",
        "‹!-- Generated",
        "release-‹request id›",
        "drive ‹request id›",
        "upper left",
        "violates podsecurity",
        "%(asctime)s",
        "call open() first",
        "data: [DONE]",
        "What shape is it?",
        "$JS.API",
    ],
)
def test_no_text_for_a_program_is_on_the_page(words: str) -> None:
    assert [row for row in ROWS if words in row[-1]] == []


def test_the_page_names_the_reason_of_every_condition() -> None:
    names = {name for row in ROWS for name in row[0].split(" or ")}
    for reason in (
        "Serving", "Paused", "Complete", "RolloutStuck", "UnknownFields", "NoProblem", "AllReady",
        "ScaledToZero", "Shadow", "Active", "NotLimited", "MetricsMissing", "AllReporting", "WaitingForGpuBudget",
    ):  # fmt: skip
        assert reason in names, reason
