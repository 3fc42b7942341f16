"""Environment variables that vLLM and its OpenMP read. OpenMP reads them when a process starts, so they are
best set before."""

from __future__ import annotations

import os

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # pods pinned to the same cores would stall each other
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs on a thread of this process
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # for ranks: this process has threads
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `Draws` and the KV pool rely on the first version
    "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "KMP_BLOCKTIME": "1",
    "KMP_AFFINITY": "none",  # otherwise Intel's OpenMP pins all forked processes to the same core
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_environment() -> None:
    """Set the variables that vLLM reads when it is imported. This engine relies on these values."""
    os.environ.update(ENVIRONMENT)
