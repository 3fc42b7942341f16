"""These tests run in vLLM's environment (`make vllm`): elsewhere there is nothing to collect, and `make test` runs them there.

If that environment has lost vLLM, they fail to be collected.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from ci.legs import VLLM_PYTHON

IS_VLLM_ENVIRONMENT = Path(sys.prefix).parts[-2:] == Path(VLLM_PYTHON).parts[:2]
collect_ignore_glob = [] if IS_VLLM_ENVIRONMENT or importlib.util.find_spec("vllm") else ["test_*.py"]
