"""These tests run in vLLM's environment (`make vllm`): elsewhere there is nothing to collect, and `make test` runs them there."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
