"""Arguments of vLLM's command line that `extraArgs` may not name.

Knows names only: vLLM's own parser checks the rest where it is installed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PATTERN = r"^--[a-z0-9][a-z0-9-]*([.][A-Za-z0-9_.]+[+]?)?(=.*)?$"
"""One argument with its value in one entry: no entry takes the next one as its value."""

HAVE_A_FIELD = (
    "block-size",
    "device-memory-utilization",
    "dtype",
    "enable-prefix-caching",
    "enforce-eager",
    "gpu-memory-utilization",
    "hf-token",
    "kv-cache-dtype",
    "kv-cache-memory-bytes",
    "log-level",
    "[a-z0-9-]*lora[a-z-]*",
    "max-model-len",
    "max-num-batched-tokens",
    "max-num-seqs",
    "model",
    "num-gpu-blocks-override",
    "otlp-traces-endpoint",
    "pipeline-parallel-size",
    "quantization",
    "revision",
    "served-model-name",
    "spec-[a-z]+",
    "speculative-config",
    "tensor-parallel-size",
)
"""Arguments that a field of the spec sets."""

OF_THE_OPERATOR = (
    "allowed-[a-z-]+",
    "api-[a-z-]+",
    "async-scheduling",
    "chat-template[a-z-]*",
    "code-revision",
    "config",
    "config-format",
    "convert",
    "device-ids",
    "disable-chunked-mm-input",
    "disable-hybrid-kv-cache-manager",
    "distributed-executor-backend",
    "download-dir",
    "ec-[a-z-]+",
    "enable-chunked-prefill",
    "enable-fault-tolerance",
    "enable-mm-embeds",
    "enable-sleep-mode",
    "fault-tolerance-config",
    "generation-config",
    "help",
    "hf-config-path",
    "hf-overrides",
    "host",
    "interleave-mm-strings",
    "io-processor-plugin",
    "kv-events-config",
    "kv-offloading-[a-z]+",
    "kv-transfer-config",
    "language-model-only",
    "limit-mm-per-prompt",
    "load-format",
    "log-config-file",
    "logging-config",
    "logits-processors",
    "logprobs-mode",
    "master-[a-z]+",
    "media-io-kwargs",
    "mm-[a-z0-9-]+",
    "model-class-overrides",
    "model-loader-extra-config",
    "nnodes",
    "node-rank",
    "override-generation-config",
    "pooler-config",
    "port",
    "profiler-config",
    "reasoning-[a-z-]+",
    "renderer-[a-z-]+",
    "root-path",
    "runner",
    "scheduler-cls",
    "scheduling-policy",
    "skip-mm-profiling",
    "skip-tokenizer-init",
    "ssl-[a-z-]+",
    "structured-outputs-config",
    "tokenizer[a-z-]*",
    "tool-[a-z-]+",
    "trust-remote-code",
    "uds",
    "video-pruning-[a-z]+",
    "weight-transfer-config",
    "worker-[a-z-]+",
)
"""Arguments that the operator sets itself, or whose work other processes do.

They are for files, code, media, transfers, scheduling, processes and HTTP.
"""

NOT_SERVED = (
    "cp-[a-z-]+",
    "data-parallel-[a-z-]+",
    "dcp-[a-z-]+",
    "decode-context-parallel-size",
    "elastic-ep-[a-z-]+",
    "disable-nccl-for-dp-synchronization",
    "dp-[a-z-]+",
    "enable-elastic-ep",
    "prefill-context-parallel-size",
)
"""Arguments for processes beyond the ranks of one replica."""


def expression(names: Sequence[str]) -> str:
    """A regular expression, the same for Python and CEL, for entries with one of these arguments.

    It also matches arguments that are negated or have a dotted key.
    """
    return f"^--(no-)?({'|'.join(names)})([.=]|$)"


def spelled(names: Sequence[str]) -> str:
    """The names as a person writes them, with * for what may follow."""
    return ", ".join(re.sub(r"\[[^]]*\][*+]|\(.*\)\?|\?", "*", name) for name in names)


def none_of(names: Sequence[str], arguments: Sequence[str]) -> bool:
    """Whether none of `arguments` has one of these names."""
    pattern = re.compile(expression(names))
    return not any(pattern.match(argument) for argument in arguments)
