"""A gateway as pods see it: it places requests on them, and keeps the tokens of each."""

from __future__ import annotations

import asyncio
import time

from mmd_api.contract.sampling import Guidance
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.gateway import RequestFailed, SequenceReceipt, SequenceReport, TokenBatch
from mmd_workers.wire.messages.message_parts import Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest, Placed
from support.harness.waiting import until

PROMPT = [5, 9, 11, 7, 6] * 12
SECONDS = 200


class Client:
    """A gateway: it places requests on a pod, and keeps the tokens of each."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.tokens: dict[str, dict[int, int]] = {}
        self.failures: list[RequestFailed] = []
        self.changed = asyncio.Event()

    async def start(self) -> None:
        subjects = self.bus.subjects
        await self.bus.subscribe(subjects.tokens("gateway-0"), TokenBatch, self._take)
        await self.bus.subscribe(subjects.failures("gateway-0"), RequestFailed, self._failed)
        await self.bus.serve(subjects.sequences("gateway-0"), SequenceReport, self._receipt)
        await self.bus.flush()

    async def _take(self, batch: TokenBatch) -> None:
        for item in batch.items:
            self.tokens.setdefault(item.request_id, {})[item.index] = item.token_id
        self.changed.set()

    async def _failed(self, failure: RequestFailed) -> None:
        self.failures.append(failure)
        self.changed.set()

    async def _receipt(self, report: SequenceReport) -> SequenceReceipt:
        return SequenceReceipt(
            [len(self.tokens.get(sequence.request_id, ())) for sequence in report.sequences]
        )

    async def place(
        self,
        pod: str,
        name: str,
        tokens: int,
        decode_pods: list[str],
        prompt: list[int] = PROMPT,
        guidance: Guidance | None = None,
    ) -> None:
        now, sampling = time.time(), Sampling(tokens, ignore_eos=True)
        request = GenerateRequest(
            *(name, 0, "gateway-0", prompt, [], sampling, decode_pods, now + SECONDS, now), guidance=guidance
        )
        placed = await self.bus.request(self.bus.subjects.prefill(pod), request, Placed, timeout=60)
        assert placed.accepted, placed

    async def until_tokens(self, name: str, count: int) -> list[int]:
        def have_arrived() -> bool:
            if self.failures:
                raise RuntimeError(f"requests failed: {self.failures}")
            return len(self.tokens.get(name, ())) >= count

        await until(have_arrived, lambda: f"{count} tokens of {name}", changed=self.changed)
        return [token for _, token in sorted(self.tokens[name].items())]
