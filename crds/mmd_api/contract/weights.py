"""Reports of the download of weights: its progress while it runs, and by its exit status why it ended."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

WeightsState = Literal["Waiting", "Downloading", "Complete"]
"""Waiting: for the list of files while `total_bytes` is 0, then for another download of the same files."""
WeightsFailure = Literal[
    "WeightsDenied", "WeightsNotFound", "WeightsTooLarge", "WeightsDamaged", "WeightsUnreachable"
]
EXIT_STATUS: dict[WeightsFailure, int] = {
    "WeightsDenied": 41,
    "WeightsNotFound": 44,
    "WeightsTooLarge": 47,
    "WeightsDamaged": 52,
    "WeightsUnreachable": 53,
}
"""Exit status of the process that downloads."""
NOT_RETRIED: tuple[WeightsFailure, ...] = ("WeightsDenied", "WeightsNotFound", "WeightsTooLarge")
"""Failures after which the next try ends in the same way, until something changes."""
MAX_PROGRESS_BYTES = 4096
LARGEST_BYTES = 10**18
Bytes = Annotated[int, Field(ge=0, le=LARGEST_BYTES)]


class WeightsError(Exception):
    """A download of weights cannot be completed. The message names the field and the remedy."""

    def __init__(self, reason: WeightsFailure, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class WeightsProgress(BaseModel):
    """Progress of the download of a deployment's weights.

    It is on `/state` of the download's pod, and at last in its termination message.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: WeightsState
    bytes: Bytes = 0
    verified_bytes: Bytes = 0
    """Bytes that this process has read again for their digests."""
    total_bytes: Bytes = 0
    bytes_per_second: Bytes = 0
    remaining_seconds: Annotated[int, Field(ge=0, le=10**9)] | None = None

    @classmethod
    def parse(cls, text: str) -> WeightsProgress:
        """Read what `dump` wrote.

        Raises:
            ValueError: the text is something else.
        """
        if len(text) > MAX_PROGRESS_BYTES:
            raise ValueError(f"progress of more than {MAX_PROGRESS_BYTES} bytes")
        return cls.model_validate_json(text)

    def dump(self) -> str:
        """JSON on one line."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True))
