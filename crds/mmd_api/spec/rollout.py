"""How changes of the spec reach pods, when a rollout has failed and what then happens, and which earlier
specs are kept.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mmd_api.base import ApiModel


class RolloutSpec(ApiModel):
    """How changes of the spec are rolled out."""

    revision_history_limit: Annotated[int, Field(ge=0, le=50)] = 10
    """Number of earlier specs that are kept for `mmd rollout undo`."""
    progress_deadline_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """Time without a further new pod that is scheduled or Ready, after which a rollout has failed. Defaults to the longest sum of schedulingDeadlineSeconds, startDeadlineSeconds and template.terminationGracePeriodSeconds of a pool."""
    on_failure: Literal["Stop", "RollBack"] = "Stop"
    """What happens to a rollout that has failed. Stop: it stays as it is, and continues if its pods become Ready. RollBack: its pods are removed until the spec changes, and the last complete spec of the serving revision stays in effect."""
    paused: bool = False
    """Whether changes of the spec wait. Those of sizes and of other fields that no pod reads do not."""
