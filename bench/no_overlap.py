"""In the pods of a bench alone: a request is given to the engine when all its media are encoded, however much text comes before the first.

`bench.mixes` has it imported by what forks the pods of a deployment (`mmd_cli.local.engines.Interpreter.imported`); nothing else does.
"""

from __future__ import annotations

import sys
from typing import Any

from mmd_workers.prefill import prefill_role
from mmd_workers.prefill.prefill_service import PrefillService


class WaitingService(PrefillService):
    """Never finds enough text before a medium."""

    def __init__(self, *args: Any, overlap_tokens: int, **others: Any) -> None:
        super().__init__(*args, overlap_tokens=sys.maxsize, **others)


prefill_role.PrefillService = WaitingService
