"""What a megabyte costs over a KV link on this machine: each backend, its transports, side by side.

    python -m bench.links [--megabytes 400] [--rounds 5] [--device cuda:0]

Two processes with one link; one sends pieces of 4 MB, the other receives them into one buffer. Rounds of the backends take turns, so that
what drifts on the machine meets all. `nixl` leaves out what a link leaves out (TCP is what remains without RDMA), `nixl all` may use
all of UCX's transports: `cma` between processes, `cuda_ipc` between GPUs. NCCL runs where it can: on two GPUs, or on one with
NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL 2.30 or newer. CPU time is that of both processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from bench.report import keep, percentiles
from mmd_workers.kv.link import PIECE_BYTES
from mmd_workers.kv.links import LinkManager

PIECE_MEGABYTES = PIECE_BYTES / 2**20
ROWS: dict[str, tuple[Literal["Gloo", "Nixl", "Nccl"], dict[str, str]]] = {
    "gloo": ("Gloo", {}),
    "nixl": ("Nixl", {}),
    "nixl all": ("Nixl", {"UCX_TLS": "all"}),
    "nccl": ("Nccl", {}),
}
SECONDS = 60.0
"""Deadline of a piece and of connecting: what takes longer is a failure."""


def rows_of(device: str) -> list[str]:
    """The links that can run between two processes with memory of this device."""
    gpus_of_nccl = 1 if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else 2
    nccl = device != "cpu" and torch.cuda.device_count() >= gpus_of_nccl
    return [row for row in ROWS if row != "nccl" or nccl]


def end(pipe: Connection, pod: str, row: str, device: str, pieces: int) -> None:
    """One process: pod `a` sends and reports how long each piece took, `b` receives."""
    backend, environment = ROWS[row]
    os.environ |= environment
    torch.set_num_threads(1)
    if device != "cpu" and pod == "b":
        device = f"cuda:{torch.cuda.device_count() - 1}"  # another GPU than the first where there is one
    piece = torch.ones(PIECE_BYTES, dtype=torch.uint8, device=device)
    manager = LinkManager(backend, pod, "i", "127.0.0.1", piece.device, SECONDS, SECONDS)
    pipe.send(manager.endpoint)
    peer = "b" if pod == "a" else "a"
    link = manager.connect(peer, "i", pipe.recv(), 0)
    move = link.send if pod == "a" else link.recv
    move(piece, 0)  # registers memory, and learns what the transport can do
    busy, took = time.process_time(), []
    for tag in range(1, pieces + 1):
        begun = time.monotonic()
        move(piece, tag)
        took.append(time.monotonic() - begun)
    pipe.send((took, time.process_time() - busy))
    pipe.recv()
    manager.close()


def measure(row: str, device: str, pieces: int) -> tuple[list[float], float]:
    """Milliseconds a megabyte of every piece, and CPU milliseconds a megabyte of both ends.

    Raises:
        RuntimeError: a process failed, or took longer than `SECONDS` for anything; neither goes on.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[SpawnProcess] = []
    try:
        for pod in ("a", "b"):
            ours, theirs = context.Pipe()
            process = context.Process(target=end, args=(theirs, pod, row, device, pieces), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process ends the pipe
            pipes.append(ours)
            processes.append(process)
        endpoints = [answer(pipe, row) for pipe in pipes]
        for pipe, peer in zip(pipes, reversed(endpoints), strict=True):
            pipe.send(peer)
        results = [answer(pipe, row) for pipe in pipes]
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join(SECONDS)
    finally:
        for process in processes:
            process.kill()
    busy = sum(cpu for _, cpu in results)
    return [1000 * took / PIECE_MEGABYTES for took in results[0][0]], 1000 * busy / pieces / PIECE_MEGABYTES


def answer(pipe: Connection, row: str) -> Any:
    """What a process reports next."""
    try:
        if pipe.poll(SECONDS):
            return pipe.recv()
    except EOFError:
        raise RuntimeError(f"{row}: a process failed; its error is above") from None
    raise RuntimeError(f"{row}: a process did not report within {SECONDS} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=400, help="for each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-report", action="store_true", help="print the table only")
    options = parser.parse_args()
    pieces = max(1, round(options.megabytes / PIECE_MEGABYTES))
    rows = rows_of(options.device)
    taken: dict[str, list[float]] = {row: [] for row in rows}
    busy: dict[str, list[float]] = {row: [] for row in rows}
    for _ in range(options.rounds):
        for row in rows:
            pieces_taken, cpu = measure(row, options.device, pieces)
            taken[row] += pieces_taken
            busy[row].append(cpu)
    table = Table("link", "ms per MB, p50", "p90", "p99", "worst", "CPU ms per MB")
    body: dict[str, Any] = {}
    for row in rows:
        found = percentiles(taken[row]) | {
            "worst": max(taken[row]),
            "cpu": statistics.median(busy[row]),
        }
        body[row] = {name: round(value, 4) for name, value in found.items()}
        table.add_row(row, *(f"{value:.2f}" for value in found.values()))
    Console().print(table)
    if not options.no_report:
        name = "links" if options.device == "cpu" else "links_cuda"
        print(keep(name, {"device": options.device, "pieces": pieces, "milliseconds_per_megabyte": body}))


if __name__ == "__main__":
    main()
