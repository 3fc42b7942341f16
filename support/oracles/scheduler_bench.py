"""Runs the steps of a scheduler without a model."""

import torch

from mmd_workers.engine.interface import SamplingParams
from mmd_workers.engine.memory.blocks import BlockPool
from mmd_workers.engine.scheduler import Scheduler
from mmd_workers.engine.sequence import Sequence
from mmd_workers.model.prompt import LoweredPrompt

NOTHING = torch.empty(0)


class Bench:
    def __init__(self, blocks=100, block_tokens=4, **settings):
        self.pool = BlockPool(blocks, block_tokens)
        defaults = {"max_sequences": 8, "chunk_tokens": 16, "prefix_cache": False}
        self.scheduler = Scheduler(self.pool, **{**defaults, **settings})
        self.arrivals = 0

    def add(self, name, tokens, missing=None, atomic=(), spans=()):
        self.arrivals += 1
        ids = list(range(tokens)) if isinstance(tokens, int) else tokens
        prompt = LoweredPrompt(ids, NOTHING, len(ids), dict(missing or {}), list(atomic))
        sequence = Sequence(
            name, self.arrivals, list(ids), len(ids), len(ids), SamplingParams(99), list(spans), prompt
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self, reserved=0):
        """One step as the engine would run it: {name: (start, end)}."""
        schedule = self.scheduler.schedule(reserved)
        ranges = {}
        for work in schedule.decodes + schedule.prefills:
            ranges[work.sequence.sequence_id] = (work.start, work.end)
            samples = work.samples
            self.scheduler.finish_chunk(work)
            if samples:
                work.sequence.token_ids.append(7)
                work.sequence.num_outputs += 1
        return ranges
