"""A worker process: loads what its roles need, joins the rooms to one service, says how it is, and drains when asked to go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Mapping

import torch

from mmd_api.pipeline import PoolName, Role
from mmd_api.spec import DecodeSpec, EncoderBatching, MultimodalDeploymentSpec, PrefillSpec
from mmd_workers.decode.service import DecodeService
from mmd_workers.decode.tokens import SequenceBook
from mmd_workers.encoder.cache import FeatureCache
from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.encoder.service import EncoderService
from mmd_workers.engine.engine import Engine
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.engine.types import StepOutput
from mmd_workers.errors import MmdError, OverloadedError
from mmd_workers.kv.links import LinkManager
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.load import load_encoder, load_language_model
from mmd_workers.model.types import EncoderModel, LanguageModel
from mmd_workers.observe.logs import configure_logging
from mmd_workers.observe.metrics import METRICS
from mmd_workers.observe.server import StatusServer
from mmd_workers.prefill.features import FeatureState, FeatureStore
from mmd_workers.prefill.handoff import KvSender
from mmd_workers.prefill.service import FeatureSource, PrefillService
from mmd_workers.prefill.sources import LocalSource, QueueSource
from mmd_workers.settings import WorkerSettings
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.jobs import EncodeQueue
from mmd_workers.wire.messages import Cancel, Heartbeat, Load, PodState
from mmd_workers.wire.peers import Heartbeater, PeerDirectory, PeerEvent
from mmd_workers.wire.subjects import Subjects

log = logging.getLogger(__name__)

MEBIBYTE = 2**20
DEFAULT_KV_MEBIBYTES = 512
DECODE_PROCESSES = 2
DECODE_MEMORY_BYTES = 2 << 30
LIVENESS_SECONDS = 60.0
ADVERTISED_DIGESTS = 64


class Worker:
    """One pod's process: roles out of encode, prefill and decode."""

    def __init__(self, settings: WorkerSettings, pool: PoolName, roles: tuple[Role, ...]) -> None:
        self.settings = settings
        self.spec: MultimodalDeploymentSpec = settings.pipeline.spec
        self.pool = pool
        self.roles = roles
        self.state: PodState = "loading"
        self.stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._pipeline: EncodePipeline | None = None
        self._encoder: EncoderService | None = None
        self._runner: EngineRunner | None = None
        self._prefill: PrefillService | None = None
        self._decode: DecodeService | None = None
        self._store: FeatureStore | None = None
        self._book: SequenceBook | None = None
        self._links: LinkManager | None = None
        self._decoders: DecodePool | None = None
        self._pending: dict[str, int] = {}
