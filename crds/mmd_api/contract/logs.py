"""What readers of a pod's log may rely on: a line of JSON each, whose level is critical where the process says why it ends."""

from __future__ import annotations

import json

CRITICAL = "critical"
RELAYED = "of the group ended: "
"""In the reason of a pod that ends because another pod of its group has: what follows is the reason of that one."""


def last_reason(log: str) -> str | None:
    """The message of the last critical line, whatever libraries print after it; None if there is none."""
    for line in reversed(log.splitlines()):
        if CRITICAL not in line:
            continue
        try:
            logged = json.loads(line)
        except ValueError:
            continue  # cut off, or of a library
        if isinstance(logged, dict) and logged.get("level") == CRITICAL:
            return str(logged.get("message"))
    return None
