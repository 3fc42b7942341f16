"""The deployment that these tests plan is the one that the API server's tests apply."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "apiserver"))
