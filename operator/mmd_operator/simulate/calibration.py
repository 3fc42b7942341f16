"""Measured numbers of real workers for the model of the pipeline, from a small YAML file in which every field has its unit.

Throughputs can be taken from the loads that live pods report (`Calibration.measured`), and the time that stages take besides their
work from timelines of requests (`measured`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from mmd_api.contract.load import PodLoad
from mmd_api.contract.pools import MODALITIES, POOL_NAMES, Modality, PoolName
from mmd_api.faults import Fault, InvalidDeploymentError, parse

Kind = Literal["text"] | Modality
KINDS: tuple[Kind, ...] = ("text", *MODALITIES)
HEAVIEST_FIRST: tuple[Modality, ...] = ("video", "audio", "image")
Factor = Annotated[float, Field(gt=0, le=1000)]
Rate = Annotated[float, Field(ge=1e-3, le=1e12)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]


class _Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class EncoderNumbers(_Part):
    """Numbers of one encoder replica.

    `startSeconds`: time from asking for a pod until it is ready. `mediaAtOnce`: media in progress at once. `overheadSeconds`: time of a
    medium outside of the slowest stage (side by side for all media in progress). `workPerSecond`: work units per second of the slowest
    stage (one medium after the other).
    """

    start_seconds: Seconds
    media_at_once: Annotated[int, Field(ge=1, le=4096)]
    overhead_seconds: dict[Modality, Seconds]
    work_per_second: dict[Modality, Rate]


class PrefillNumbers(_Part):
    """Numbers of one prefill replica: start-up time, time per request besides its tokens, prompt tokens per second."""

    start_seconds: Seconds
    overhead_seconds: Seconds
    tokens_per_second: Rate


class DecodeNumbers(_Part):
    """Numbers of one decode replica. A step of n sequences takes `stepSeconds + n * stepSecondsPerSequence`. KV blocks have the spec's size."""

    start_seconds: Seconds
    step_seconds: Annotated[float, Field(ge=1e-6, le=3600)]
    step_seconds_per_sequence: Seconds
    kv_blocks: Annotated[int, Field(ge=1, le=10**9)]


class TransferNumbers(_Part):
    """Transfer times of the embeddings of one medium to prefill, and of the KV of one token to decode."""

    seconds_per_medium: Seconds
    seconds_per_token: Seconds


class DeviceNumbers(_Part):
    """Utilisation metrics of a replica whose GPU works.

    `hostCores`: cores that launch kernels and wait for them (a thread that waits for CUDA spins). `kernelShare`: share of that time
    in which a kernel runs, for one sequence as for a full batch.
    """

    host_cores: Annotated[float, Field(ge=0, le=1024)] = 1.0
    kernel_share: Annotated[float, Field(gt=0, le=1)] = 0.9


class Calibration(_Part):
    """Numbers of one replica of each pool, and the encoder work of one medium of each kind, for traces that give none.

    `spread`: equally likely factors, by the heaviest medium of a request. A request draws one factor for all of its stages before the
    first token (no two requests are alike, and what slows one stage of a request mostly slows the others). Kinds that are not named
    take the typical time. `contention`: the share by which each other request in flight lengthens the stages of a new request, if
    replicas share cores; 0 if each has its own.
    """

    encoder: EncoderNumbers
    prefill: PrefillNumbers
    decode: DecodeNumbers
    media: dict[Modality, Annotated[float, Field(ge=0, le=1e12)]]
    transfer: TransferNumbers
    gateway_seconds: Seconds
    device: DeviceNumbers = DeviceNumbers()
    spread: dict[Kind, Annotated[list[Factor], Field(min_length=1, max_length=1000)]] = {}
    contention: Annotated[float, Field(ge=0, le=100)] = 0.0

    @classmethod
    def load(cls, path: str | Path | None) -> Calibration:
        """Read a YAML file; None: the package's assumed numbers.

        Raises:
            InvalidDeploymentError: with every fault in the file.
        """
        try:
            text = (
                files(__package__).joinpath("assumed.yaml").read_text()
                if path is None
                else Path(path).read_text(encoding="utf-8")
            )
            data = yaml.safe_load(text)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise InvalidDeploymentError([Fault("", f"cannot be read as YAML ({error})")]) from error
        calibration = parse(cls, data)
        faults = [
            Fault(f"{field}.{modality}", "is not set; a trace may contain such media")
            for field, values in (
                ("media", calibration.media),
                ("encoder.workPerSecond", calibration.encoder.work_per_second),
                ("encoder.overheadSeconds", calibration.encoder.overhead_seconds),
            )
            for modality in MODALITIES
            if modality not in values
        ]
        if faults:
            raise InvalidDeploymentError(faults)
        return calibration

    def to_yaml(self) -> str:
        """YAML that `load` reads."""
        return yaml.safe_dump(self.model_dump(mode="json", by_alias=True), sort_keys=False)

    def measured(self, loads: Mapping[PoolName, PodLoad]) -> Calibration:
        """A copy with the throughputs, KV blocks and step time that one busy pod of each pool reported, if it has measured them."""
        encode, prefill, decode = (loads.get(p, PodLoad()) for p in POOL_NAMES)
        rates = {m: r for m in MODALITIES if (r := encode.encode_work_per_second.get(m, 0.0)) > 0}
        step_seconds = decode.itl_seconds - decode.decode_running * self.decode.step_seconds_per_sequence
        return self.model_copy(
            update={
                "encoder": self.encoder.model_copy(
                    update={"work_per_second": {**self.encoder.work_per_second, **rates}}
                ),
                "prefill": self.prefill.model_copy(
                    update={
                        "tokens_per_second": prefill.prefill_tokens_per_second
                        or self.prefill.tokens_per_second
                    }
                ),
                "decode": self.decode.model_copy(
                    update={
                        "kv_blocks": int(decode.kv_blocks_total) or self.decode.kv_blocks,
                        "step_seconds": step_seconds if step_seconds > 0 else self.decode.step_seconds,
                    }
                ),
            }
        )
