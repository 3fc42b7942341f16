"""What `mmd rollout` reads from a deployment and its recorded specs, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from mmd_api.history import COMPLETED_ANNOTATION, SPEC_LABEL, spec_digest
from mmd_cli.errors import CommandError
from mmd_cli.rollout_history import chosen, differences, entries_of, history_rows, spec_of, state_of, undone
from support.cluster.deployments import ANOTHER_MODEL, SPEC, deployment
from support.cluster.manifests import merge

DOUBLED = merge(SPEC, {"decode": {"maxSequences": 8, "replicas": 4}})
SPECS = [SPEC, DOUBLED, merge(DOUBLED, ANOTHER_MODEL)]
BODY: dict[str, Any] = {
    "apiVersion": "serving.multimodal.dev/v1alpha1",
    "kind": "MultimodalDeployment",
    "metadata": {"name": "demo", "uid": "u", "generation": 4},
    "spec": SPECS[-1],
    "status": {"pipelineRevision": "aaaaaaaaaa"},
}


def digest(spec: dict[str, Any]) -> str:
    return spec_digest(deployment(spec).spec)


def item(number: int, spec: dict[str, Any], *, completed: bool = True, uid: str = "u") -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"demo.spec-{number}",
            "creationTimestamp": f"2027-01-0{number}T00:00:00Z",
            "labels": {SPEC_LABEL: digest(spec), "serving.multimodal.dev/revision": "aaaaaaaaaa"},
            "annotations": {COMPLETED_ANNOTATION: "2027-01-09T00:00:00Z"} if completed else None,
            "ownerReferences": [{"uid": uid, "controller": True}],
        },
        "revision": number,
        "data": {"spec": spec},
    }


ITEMS = [item(3, SPECS[2], completed=False), item(1, SPECS[0]), item(2, SPECS[1], completed=False)]
ENTRIES = entries_of([*ITEMS, item(9, SPEC, uid="of-an-earlier-one")], "u")


def test_entries_are_those_of_the_deployment_the_oldest_first():
    assert [entry.number for entry in ENTRIES] == [1, 2, 3]


@pytest.mark.parametrize(
    ("present", "number", "found"),
    [(SPECS[2], None, 1), (SPECS[2], 2, 2), (SPECS[0], None, 3), (SPECS[2], 3, 3)],
)
def test_undo_takes_the_newest_other_complete_spec_or_the_named_one(present, number, found):
    assert chosen(ENTRIES, digest(present), number).number == found


@pytest.mark.parametrize(
    ("entries", "number", "words"),
    [
        (ENTRIES, 7, "there is no revision 7; revisions: 1, 2, 3"),
        (ENTRIES[2:], None, "there is no earlier revision (revisions: 3); raise spec.rollout"),
        ([], None, "revisions: none"),
    ],
)
def test_undo_names_what_there_is_where_it_cannot_return(entries, number, words):
    with pytest.raises(CommandError) as refused:
        chosen(entries, digest(SPECS[2]), number)
    assert words in refused.value.message


def test_undo_keeps_the_present_size_and_is_refused_while_paused():
    assert undone(BODY, ENTRIES[0]) == merge(SPEC, {"decode": {"replicas": 4}})
    with pytest.raises(CommandError, match="mmd rollout resume demo"):
        undone(merge(BODY, {"spec": {"rollout": {"paused": True}}}), ENTRIES[0])


def test_a_spec_that_present_rules_refuse_is_named_with_its_faults():
    with pytest.raises(CommandError, match=r"spec\.decode\.maxSequences: .*\n.*choose another revision"):
        spec_of(BODY, merge(SPEC, {"decode": {"maxSequences": -1}}))


def test_a_difference_names_the_field_its_values_and_what_the_change_does():
    one, other = (deployment(spec).spec for spec in (SPECS[0], merge(SPECS[2], {"encoder": None})))
    assert differences(one, other) == [
        "spec.model.dtype: Float32 -> BFloat16 (new revision)",
        'spec.encoder: {"gpus": 0} -> not set (replaces gateway, prefill)',
        "spec.decode.replicas: 2 -> 4 (no restart)",
        "spec.decode.maxSequences: 64 -> 8 (replaces prefill, decode)",
    ]
    assert not any("replicas" in line for line in differences(one, other, of_pods=True))


def test_the_history_shows_what_each_spec_changed_and_which_is_in_effect():
    rows = history_rows(BODY, ENTRIES, digest(SPECS[2]))
    assert [(row[0], row[3], row[4]) for row in rows] == [
        ("1", "2027-01-09T00:00:00Z", ""),
        ("2", "never", ""),
        ("3", "never", "in effect"),
    ]
    assert [row[5].partition(":")[0] for row in rows] == ["", "spec.decode.maxSequences", "spec.model.dtype"]
    back = merge(BODY, {"status": {"rolledBack": {"spec": digest(SPECS[0])}}})
    assert [row[4] for row in history_rows(back, ENTRIES, digest(SPECS[2]))] == ["in effect", "", "the spec"]
    held = merge(
        BODY,
        {"spec": {"rollout": {"paused": True}}, "status": {"rolloutProgress": {"spec": digest(SPECS[1])}}},
    )
    assert [row[4] for row in history_rows(held, ENTRIES, digest(SPECS[2]))] == ["", "in effect", "the spec"]


def progressing(reason: str, generation: int = 4, observed: int = 4) -> dict[str, Any]:
    condition = {
        "type": "Progressing",
        "reason": reason,
        "message": "words",
        "observedGeneration": generation,
    }
    return merge(BODY, {"status": {"observedGeneration": observed, "conditions": [condition]}})


@pytest.mark.parametrize(
    ("body", "words", "complete"),
    [
        (merge(BODY, {"status": None}), "waiting for the operator to observe generation 4", None),
        (progressing("Complete", observed=3), "waiting for the operator to observe generation 4", None),
        (progressing("Complete", generation=3), "waiting for the operator to observe generation 4", None),
        (progressing("Complete"), "Complete: words", True),
        (progressing("ProgressDeadlineExceeded"), "ProgressDeadlineExceeded: words", False),
        (progressing("BringingUp"), "BringingUp: words", None),
        (progressing("RolloutStuck"), "RolloutStuck: words", None),
        (progressing("RolloutPaused"), "RolloutPaused: words", None),
    ],
)
def test_a_rollout_ends_when_reported_for_the_present_generation(body, words, complete):
    found = state_of(body)
    assert (found.words, found.complete) == (words, complete)
