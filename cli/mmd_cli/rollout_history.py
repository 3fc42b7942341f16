"""Describes the recorded specs of a deployment: which exist, how they differ, and how far a rollout is.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mmd_api.base import ApiModel
from mmd_api.history import COMPLETED_ANNOTATION, SPEC_LABEL, is_read_by_pods, restored
from mmd_api.readers import changed_paths, value_at
from mmd_api.reference import change_of
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_cli.errors import CommandError
from mmd_operator.observed.observed import controlling_owner
from mmd_operator.observed.stored_spec import read
from mmd_operator.resources.naming import REVISION_LABEL

MAX_VALUE_CHARACTERS = 60
COMPLETE, FAILED = "Complete", "ProgressDeadlineExceeded"


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """A recorded spec.

    `revision`: its pipeline revision; `completed`: when all its pods were first Ready, as text.
    """

    number: int
    digest: str
    revision: str
    created: str
    completed: str | None
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RolloutVerdict:
    """How far a rollout is. `complete` is None while it may still succeed or fail."""

    words: str
    complete: bool | None


def entries_of(items: Iterable[Mapping[str, Any]], uid: str) -> list[HistoryEntry]:
    """Recorded specs of the deployment with this UID from its ControllerRevisions, the oldest first."""
    entries = []
    for body in items:
        metadata = body["metadata"]
        if controlling_owner(metadata) != uid:
            continue
        labels = metadata["labels"]
        completed = (metadata.get("annotations") or {}).get(COMPLETED_ANNOTATION)
        entries.append(
            HistoryEntry(
                body["revision"],
                labels[SPEC_LABEL],
                labels.get(REVISION_LABEL, ""),
                str(metadata.get("creationTimestamp", "")),
                completed,
                body["data"]["spec"],
            )
        )
    return sorted(entries, key=lambda entry: entry.number)


def spec_of(body: Mapping[str, Any], spec: Mapping[str, Any]) -> MultimodalDeploymentSpec:
    """A spec of the deployment `body`, read as the operator reads it.

    Raises:
        CommandError: the spec is invalid.
    """
    reading = read({**body, "spec": spec})
    if reading.deployment is None:
        faults = "\n".join(str(fault) for fault in reading.faults)
        raise CommandError(
            f"the spec is invalid:\n{faults}\nchange these fields of the deployment first, or choose another revision"
        )
    return reading.deployment.spec


def differences(
    before: MultimodalDeploymentSpec, after: MultimodalDeploymentSpec, *, of_pods: bool = False
) -> list[str]:
    """A line for each field that differs: `spec.decode.gpus: 1 -> 2 (replaces its pods)`.

    `of_pods`: only fields that pods read.
    """
    return [
        f"spec.{path}: {_shown(value_at(before, path))} -> {_shown(value_at(after, path))} ({change_of(path)})"
        for path in changed_paths(before, after)
        if is_read_by_pods(path) or not of_pods
    ]


def chosen(entries: Sequence[HistoryEntry], present: str, number: int | None) -> HistoryEntry:
    """The entry to return to: the one with the number, else the newest other one, if possible one that was
    complete.

    `present`: digest of the present spec.

    Raises:
        CommandError: there is no such entry.
    """
    numbers = ", ".join(str(entry.number) for entry in entries) or "none"
    if number is not None:
        entry = next((entry for entry in entries if entry.number == number), None)
        if entry is None:
            raise CommandError(
                f"there is no revision {number}; revisions: {numbers} (see `mmd rollout history`)"
            )
        return entry
    earlier = [entry for entry in entries if entry.digest != present]
    if not earlier:
        raise CommandError(
            f"there is no earlier revision (revisions: {numbers}); raise spec.rollout.revisionHistoryLimit to keep more"
        )
    return max(earlier, key=lambda entry: (entry.completed is not None, entry.number))


def undone(body: Mapping[str, Any], entry: HistoryEntry) -> dict[str, Any]:
    """The spec with which the deployment returns to an entry. Fields that no pod reads stay as they are.

    Raises:
        CommandError: the rollout of the deployment is paused.
    """
    if (body["spec"].get("rollout") or {}).get("paused"):
        name = body["metadata"]["name"]
        raise CommandError(f"the rollout of {name} is paused; run `mmd rollout resume {name}` first")
    return restored(body["spec"], entry.spec)


def history_rows(
    body: Mapping[str, Any], entries: Sequence[HistoryEntry], present: str
) -> list[tuple[str, ...]]:
    """Number, pipeline revision, times, state and changes of each entry, the oldest first."""
    rows: list[tuple[str, ...]] = []
    before: MultimodalDeploymentSpec | None = None
    serving = body.get("status", {}).get("pipelineRevision")
    status = body.get("status", {})
    in_effect = (status.get("rolledBack") or {}).get("spec", present)
    if (body["spec"].get("rollout") or {}).get("paused"):
        in_effect = (status.get("rolloutProgress") or {}).get("spec", in_effect)
    for entry in entries:
        spec, lines = None, ["cannot be read by this release"]
        with suppress(CommandError):
            spec = spec_of(body, entry.spec)
            lines = differences(before, spec, of_pods=True) if before is not None else []
        states = [
            *(
                ["in effect" if entry.revision == serving else "in rollout"]
                if entry.digest == in_effect
                else []
            ),
            *(["the spec"] if entry.digest == present != in_effect else []),
        ]
        completed = entry.completed or "never"
        rows.append(
            (str(entry.number), entry.revision, entry.created, completed, ", ".join(states), "\n".join(lines))
        )
        before = spec
    return rows


def state_of(body: Mapping[str, Any]) -> RolloutVerdict:
    """How far the rollout of a deployment is, according to its status."""
    status, generation = body.get("status") or {}, body["metadata"].get("generation", 0)
    progress = next((c for c in status.get("conditions") or () if c["type"] == "Progressing"), None)
    if (
        progress is None
        or status.get("observedGeneration", 0) < generation
        or progress["observedGeneration"] < generation
    ):
        return RolloutVerdict(f"waiting for the operator to observe generation {generation}", None)
    complete = {COMPLETE: True, FAILED: False}.get(progress["reason"])
    return RolloutVerdict(f"{progress['reason']}: {progress.get('message', '')}", complete)


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, ApiModel):
        value = value.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    elif isinstance(value, list):
        value = [v.model_dump(mode="json", by_alias=True) if isinstance(v, ApiModel) else v for v in value]
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[:MAX_VALUE_CHARACTERS] + "..."
