"""The warm-up of a pod before it reports Ready, so that its first request is no slower than the next.

A warm-up leaves no trace: no count, no estimate, nothing in a cache. Independent of the network.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import torch

from mmd_api.contract.pools import Modality
from mmd_api.spec.media import MediaPolicy
from mmd_workers.basics.device import check_device
from mmd_workers.media import samples
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.interfaces import Frontend
from mmd_workers.model.prompt import MediumLayout
from mmd_workers.observe.startup import Startup

log = logging.getLogger(__name__)

LIMIT_SECONDS = 30.0

WarmUpStep = Callable[[], Awaitable[object]]


async def warm_up(
    steps: Mapping[str, WarmUpStep],
    startup: Startup,
    device: torch.device,
    limit_seconds: float = LIMIT_SECONDS,
) -> None:
    """Run the steps one after the other, each a phase of the start.

    A step that fails or does not end in time is logged and does not keep the pod from serving: its requests would fail, or be slow, one
    by one and with their own reasons.

    Raises:
        DeviceLostError: the accelerator does not work.
    """
    deadline = asyncio.get_running_loop().time() + limit_seconds
    for name, step in steps.items():
        with startup.phase(f"warm_up_{name}"):
            try:
                async with asyncio.timeout_at(deadline):
                    await step()
            except TimeoutError:
                log.warning(
                    "warm-up of %s did not finish: all warm-ups together are limited to %.0f s; the first request of that kind will be slow",
                    name,
                    limit_seconds,
                )
            except Exception as error:  # noqa: BLE001  a model can raise anything
                check_device(error, device)
                log.warning(
                    "warm-up of %s failed; requests of that kind may fail too: %s: %s",
                    name,
                    type(error).__name__,
                    str(error)[:300],
                )


def media_steps(
    decoders: DecodePool,
    frontend: Frontend,
    policy: MediaPolicy,
    encode: Callable[[bytes, MediumLayout], Awaitable[object]] | None = None,
) -> dict[str, WarmUpStep]:
    """For each modality that the model takes: probe a small medium in every decode process, lay it out, and `encode` it."""

    async def take(modality: Modality) -> None:
        data = await asyncio.to_thread(samples.sample, modality)
        probes = (decoders.probe(data, modality, policy) for _ in range(decoders.processes))
        info, *_ = await asyncio.gather(*probes)
        message = {"role": "user", "content": [{"type": modality}]}
        (layout,) = (await asyncio.to_thread(frontend.layout, [message], [info])).media
        if encode is not None:
            await encode(data, layout)

    return {modality: partial(take, modality) for modality in sorted(frontend.modalities)}
