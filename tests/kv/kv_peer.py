"""A worker process with its own KV links, driven through a pipe by the tests."""

import multiprocessing
from multiprocessing.connection import Connection
from types import SimpleNamespace

import torch

from mmd_api.contract.errors import MmdError
from mmd_workers.kv import chunks
from mmd_workers.kv.links import LinkManager
from support.harness.waiting import DEADLINE_SECONDS

LAYOUT = SimpleNamespace(num_layers=3, num_kv_heads=[4, 2, 4], head_dim=[64, 128, 96], dtype="bfloat16")
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["mmd_workers.kv.links"])


def pattern(num_tokens: int, seed: int) -> list[torch.Tensor]:
    """The KV of a token range, random but the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    tensors = chunks.empty_range(LAYOUT, num_tokens, torch.device("cpu"))
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return tensors


def serve(pipe: Connection, pod: str, incarnation: str, settings: dict) -> None:
    torch.set_num_threads(1)
    device = torch.device(settings.pop("device", "cpu"))
    settings = {"connect_timeout_seconds": 30.0} | settings
    manager = LinkManager(settings.pop("backend", "Gloo"), pod, incarnation, "127.0.0.1", device, **settings)
    pipe.send(manager.endpoint)
    link = None
    while True:
        command, *arguments = pipe.recv()
        try:
            if command == "connect":
                link = manager.connect(*arguments)
                pipe.send(link.epoch)
            elif command == "send":
                num_tokens, seed, tag = arguments
                pipe.send(chunks.send_range(link, [t.to(device) for t in pattern(num_tokens, seed)], tag))
            elif command == "recv":
                num_tokens, seed, tag = arguments
                got = [tensor.cpu() for tensor in chunks.recv_range(link, LAYOUT, num_tokens, tag, device)]
                pipe.send(all(torch.equal(a, b) for a, b in zip(got, pattern(num_tokens, seed), strict=True)))
            elif command in ("send_forever", "recv_forever"):
                piece = torch.zeros(4 * 2**20, dtype=torch.uint8, device=device)
                pipe.send("going")
                tag = 0
                while True:
                    (link.send if command == "send_forever" else link.recv)(piece, tag)
                    tag += 1
            elif command == "close":
                manager.close()
                pipe.send("closed")
                return
        except MmdError as error:
            pipe.send(error.message)


class Peer:
    """The handle of such a process."""

    def __init__(self, pod: str, incarnation: str = "i0", **settings) -> None:
        self.pod, self.incarnation = pod, incarnation
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, pod, incarnation, settings), daemon=True)
        self.process.start()
        theirs.close()
        self.endpoint = self.answer(30)

    def start(self, *command) -> None:
        self.pipe.send(command)

    def answer(self, seconds: float = DEADLINE_SECONDS):
        assert self.pipe.poll(seconds), f"{self.pod} did not answer within {seconds} s"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(5)
