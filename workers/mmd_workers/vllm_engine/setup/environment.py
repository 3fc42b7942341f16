"""What vLLM and its OpenMP read from the environment of a process: the latter when the process starts, so that it is best set before."""

from __future__ import annotations

import os

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # pinned to the same cores, pods would stall each other
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs on a thread of this process
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # ranks: this process has threads
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `Draws` and the KV pool are those of the first
    "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "KMP_BLOCKTIME": "1",
    "KMP_AFFINITY": "none",  # else Intel's OpenMP pins every forked process to one core, the same for all
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_environment() -> None:
    """Set what vLLM reads when it is imported. Another value would change what this engine relies on."""
    os.environ.update(ENVIRONMENT)
