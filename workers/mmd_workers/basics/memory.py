"""Divides a pod's memory into weights, activations, and a KV pool with a share of the rest. Independent of the model and the network."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from mmd_api.contract.errors import MemoryBudgetError

MEBIBYTE = 2**20
GPU_PERCENT = 90
CPU_PERCENT = 50
"""On a CPU, features, media and the process itself live in the same memory."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of the device's memory. `used_bytes`: everything there before the KV pool, weights included."""

    total_bytes: int
    used_bytes: int
    activation_bytes: int
    percent: int  # share of the rest for the KV pool
    override_bytes: int | None = None  # spec.<pool>.kvCacheMebibytes
    tower_bytes: int = 0  # activations of the largest tower run, which may coincide with the largest step

    @property
    def left_bytes(self) -> int:
        """Bytes that weights and activations leave."""
        return max(0, self.total_bytes - self.used_bytes - self.activation_bytes - self.tower_bytes)

    def kv_bytes(
        self, *, bytes_per_token: int, block_tokens: int, max_model_len: int, max_sequences: int, pool: str
    ) -> int:
        """Size of the KV pool: the override, or the share, but no more than `max_sequences` requests of full length can use.

        Raises:
            MemoryBudgetError: the pool does not hold one request of `max_model_len` tokens.
        """
        block_bytes = bytes_per_token * block_tokens
        needed = -(-max_model_len // block_tokens) * block_bytes
        num_bytes = self.override_bytes or min(self.left_bytes * self.percent // 100, max_sequences * needed)
        if num_bytes >= needed:
            return num_bytes
        tokens = num_bytes // block_bytes * block_tokens
        if self.override_bytes:
            raise MemoryBudgetError(
                f"spec.{pool}.kvCacheMebibytes: {num_bytes // MEBIBYTE} MiB holds KV for {tokens} tokens, but one request of "
                f"maxModelLen {max_model_len} needs {_mebibytes(needed)}; raise it to that or more, or set spec.model.maxModelLen "
                f"to {tokens} or less"
            )
        tower, remedy = "", ""
        if self.tower_bytes:
            tower = f", {_mebibytes(self.tower_bytes)} by those of the tower"
            remedy = ", lower the limits of spec.gateway.media, or add an encoder pool (spec.encoder)"
        raise MemoryBudgetError(
            f"spec.{pool}: of {_mebibytes(self.total_bytes)} of memory, {_mebibytes(self.used_bytes)} are used by weights and process, "
            f"{_mebibytes(self.activation_bytes)} by activations{tower}; {self.percent} % of the rest is {_mebibytes(num_bytes)}, "
            f"enough KV for {tokens} tokens, but one request of maxModelLen {max_model_len} needs {_mebibytes(needed)}; set "
            f"spec.model.maxModelLen to {tokens} or less, or give the pod more memory{remedy}"
        )


def _mebibytes(num_bytes: int) -> str:
    return f"{-(-num_bytes // MEBIBYTE)} MiB"


def default_percent(device: torch.device) -> int:
    """The KV pool's share if spec.<pool>.kvCachePercent is not set."""
    return CPU_PERCENT if device.type == "cpu" else GPU_PERCENT


def measure(device: torch.device, fraction: float) -> tuple[int, int]:
    """(total, used) bytes of the memory that this process may use; `fraction` of it if others share the machine.

    On a CPU, the total is the container's limit; without a limit, half of the machine's available memory, since others count on it too.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if fraction < 1:
            return int(total * fraction), torch.cuda.memory_reserved(device)
        return total, total - free
    resident = resident_bytes()
    limit, machine = container_limit(), _meminfo("MemTotal")
    if limit is None or limit >= machine:
        limit = (_meminfo("MemAvailable") + resident) // 2
    return int(limit * fraction), resident


def container_limit() -> int | None:
    """The memory limit of this container's cgroup in bytes, if it has one."""
    for file in _CGROUP_LIMITS:
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def host_bytes() -> int:
    """Memory of this container, or of the machine if the container has no limit."""
    machine = _meminfo("MemTotal")
    return min(container_limit() or machine, machine)


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise MemoryBudgetError(f"/proc/meminfo has no {field}; set kvCacheMebibytes of the pool")


def resident_bytes() -> int:
    """Memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
