"""Format of a pod's log that readers may rely on.

Each line is JSON. A process states in a line of level critical why it ends.
"""

from __future__ import annotations

import json

CRITICAL = "critical"
RELAYED = "of the group ended: "
"""Part of the reason of a pod that ends because another pod of its group has ended.

The reason of that other pod follows.
"""


def last_reason(log: str) -> str | None:
    """The message of the last critical line, whatever libraries print after it. None if there is none."""
    for line in reversed(log.splitlines()):
        if CRITICAL not in line:
            continue
        try:
            logged = json.loads(line)
        except ValueError:
            continue  # truncated, or from a library
        if isinstance(logged, dict) and logged.get("level") == CRITICAL:
            return str(logged.get("message"))
    return None
