"""The sequences and reservations of vLLM's core, and the blocks and features that they hold. Not thread safe."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from mmd_workers.model.grammar import Constraint
from mmd_workers.vllm_engine.features import Shelf
from mmd_workers.vllm_engine.metrics import VllmMetrics
from mmd_workers.wire.messages.prefill import GenerateRequest


@dataclass(slots=True)
class CoreSequence:
    """State of a request in this engine."""

    source: GenerateRequest
    request: Request
    first: int  # index of the first token that is generated here
    stop_after_prefill: bool = False
    attached: bool = False
    constraint: Constraint | None = None  # has advanced over all output tokens
    made: int = 0
    blocks: list[KVCacheBlock] = field(default_factory=list)  # kept for `read_kv`
    identities: list[bytes] = field(default_factory=list)  # see `PrefixBlocks.note`
    computed: int = 0  # tokens whose KV is in `blocks`
    announced: int = 0  # tokens reported as KvReady; a preemption may take their KV away for a while

    @property
    def decodes(self) -> bool:
        """True if only the newest token has no KV. A preemption removes all KV, and the sequence prefills again."""
        without_kv = self.request.num_tokens - self.request.num_computed_tokens
        return without_kv == 1 and bool(self.made or self.attached)


@dataclass(slots=True)
class CoreReservation:
    """Blocks of a sequence whose KV will arrive from another pod."""

    blocks: list[KVCacheBlock]
    prompt_tokens: int
    shared: int  # leading blocks taken from the prefix cache
    written: int


class CoreTable:
    """Sequences and reservations by name. What leaves it gives back all that it holds."""

    def __init__(self, scheduler: Scheduler, shelf: Shelf, metrics: VllmMetrics) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._shelf, self._metrics = shelf, metrics
        self.sequences: dict[str, CoreSequence] = {}
        self.reservations: dict[str, CoreReservation] = {}
        self.reported: dict[str, int] = {}
        """Computed tokens last reported, by name of a sequence that waits for a feature."""

    def check_new(self, name: str) -> None:
        """Check that a name is free.

        Raises:
            ValueError: the name is in use.
        """
        if name in self.sequences or name in self.reservations:
            raise ValueError(f"sequence id {name} is in use")

    def abort(self, name: str) -> None:
        """Forget a sequence or reservation in any state and free its blocks and features; unknown ids are ignored."""
        if (reservation := self.reservations.pop(name, None)) is not None:
            self._pool.free_blocks(reversed(reservation.blocks))
        if (sequence := self.sequences.pop(name, None)) is not None:
            self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self._pool.free_blocks(reversed(sequence.blocks))
            self._shelf.release(name)
            self.reported.pop(name, None)
            self._metrics.forget(name)

    def abort_spoiled(self, name: str, sequence: CoreSequence) -> None:
        """Abort a sequence whose KV may not be numbers, so that no other sequence finds it.

        Its blocks are zeroed before they are allocated again.
        """
        blocks = {block.block_id for block in sequence.blocks}
        blocks.update(block for group in self._manager.get_block_ids(name) for block in group)
        for block_hash in sequence.request.block_hashes:
            blocks.update(block.block_id for block in self._pool.get_cached_block(block_hash, [0]) or ())
        self._pool.evict_blocks(blocks)
        self.abort(name)

    def keep_blocks(self, sequence: CoreSequence) -> None:
        """Keep a reference to a prefilling sequence's blocks until `abort`: vLLM frees its own when the prefill ends."""
        blocks = self._manager.get_blocks(sequence.request.request_id).blocks[0]
        new_blocks = blocks[len(sequence.blocks) :]
        self._pool.touch(new_blocks)
        sequence.blocks += new_blocks

    def release_blocks(self, sequence: CoreSequence) -> None:
        """Release a preempted sequence's blocks: sequences that each kept half of the pool would wait for one another.

        vLLM computes the tokens again, or finds them in its prefix cache.
        """
        self._pool.free_blocks(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.computed = 0
