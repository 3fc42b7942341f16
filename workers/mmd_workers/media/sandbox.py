"""Decoding bytes from outside in processes of their own, so that a crash, a hang or a bomb costs one medium and one process.

Bytes and pixels pass through anonymous shared memory (memfd), never through pipes; it vanishes with its last holder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmd_workers.errors import BadMediaError, OverloadedError
from mmd_workers.media import decode
from mmd_workers.media.decode_process import MAX_MESSAGE_BYTES
from mmd_workers.media.types import DecodedAudio, DecodedImage, DecodedVideo, MediumInfo, Modality

if TYPE_CHECKING:
    from mmd_api.spec import MediaPolicy

log = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 30.0
CLOSE_TIMEOUT_SECONDS = 5.0
EXIT_SECONDS = 5.0
STOPPING = "this worker is stopping; the decode can be done elsewhere"
_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


class _ProcessLostError(Exception):
    """The decode process ended or never answered."""


@dataclass(slots=True)
class _Decoder:
    """A running decode process and this end of its socket (one message in, one out)."""

    process: asyncio.subprocess.Process
    control: socket.socket

    async def receive(self) -> dict[str, Any]:
        try:
            message = await asyncio.get_running_loop().sock_recv(self.control, MAX_MESSAGE_BYTES)
        except OSError as error:
            raise _ProcessLostError from error
        if not message:
            raise _ProcessLostError
        reply: dict[str, Any] = json.loads(message)
        return reply

    async def ended(self) -> int:
        """Exit status of a process that left its socket; killed where it does not go.

        To kill it at once would reap it behind asyncio's back, which then reports 255 in place of the true status.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_SECONDS):
                return await self.process.wait()
        self.kill()
        return await self.process.wait()

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        self.control.close()


@dataclass(slots=True)
class _Slot:
    decoder: _Decoder | None = None

    def discard(self) -> None:
        """Kill the process; the next job starts a new one."""
        if self.decoder is not None:
            self.decoder.kill()
            self.decoder = None


class DecodePool:
    """At most `processes` decodes at a time, each in a process that is reused until it fails; callers beyond that wait.

    A decode may take `decode_timeout_seconds` of wall time and map `memory_bytes` beyond the idle process: the bytes
    twice, the result once, and what the decoder needs.
    """

    def __init__(self, processes: int, decode_timeout_seconds: int, memory_bytes: int) -> None:
        self._timeout_seconds = decode_timeout_seconds
        self._memory_bytes = memory_bytes
        self._slots = [_Slot() for _ in range(processes)]
        self._free: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        for slot in self._slots:
            self._free.put_nowait(slot)
        self._started: set[asyncio.subprocess.Process] = set()
        self._closed = False

    async def start(self) -> None:
        """Start every process and wait until each is ready.

        Raises:
            OverloadedError: one did not start in time.
        """
        decoders = await asyncio.gather(*(self._spawn() for _ in self._slots))
        for slot, decoder in zip(self._slots, decoders, strict=True):
            slot.decoder = decoder

    async def close(self) -> None:
        """Kill every process and wait until all are gone; decodes under way fail with OverloadedError."""
        self._closed = True
        for process in self._started:
            if process.returncode is None:
                process.kill()
        async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
            await asyncio.gather(*(process.wait() for process in self._started))
            for _ in self._slots:  # a job under way sees its socket end first, then gives its place back
                (await self._free.get()).discard()

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes that are alive."""
        return [slot.decoder.process.pid for slot in self._slots if slot.decoder is not None]

    async def probe(self, data: bytes, modality: Modality, policy: MediaPolicy) -> MediumInfo:
        """`media.probe.probe` in a decode process. Raises BadMediaError, OverloadedError."""
        job = {"kind": "probe", "modality": modality, "policy": policy.model_dump(mode="json", by_alias=True)}
        reply, _ = await self._run(job, data, 1)
        return MediumInfo(**reply["info"])

    async def decode_image(self, data: bytes, info: MediumInfo) -> DecodedImage:
        """`media.decode.decode_image` in a decode process. Raises BadMediaError, OverloadedError."""
        shape = decode.image_shape(info)
        _, result = await self._run({"kind": "image", "info": asdict(info)}, data, int(np.prod(shape)))
        return DecodedImage(np.frombuffer(result, np.uint8).reshape(shape))

    async def decode_video(self, data: bytes, info: MediumInfo, frame_indices: Sequence[int]) -> DecodedVideo:
        """`media.decode.decode_video` in a decode process. Raises BadMediaError, OverloadedError."""
        indices = list(frame_indices)
        shape = decode.video_shape(info, indices)
        job = {"kind": "video", "info": asdict(info), "frame_indices": indices}
        _, result = await self._run(job, data, int(np.prod(shape)))
        return DecodedVideo(
            np.frombuffer(result, np.uint8).reshape(shape), indices, info.fps, info.num_frames
        )

    async def decode_audio(
        self, data: bytes, info: MediumInfo, sample_rate_hz: int, num_samples: int
    ) -> DecodedAudio:
        """`media.decode.decode_audio` in a decode process. Raises BadMediaError, OverloadedError."""
        job = {
            "kind": "audio",
            "info": asdict(info),
            "sample_rate_hz": sample_rate_hz,
            "num_samples": num_samples,
        }
        _, result = await self._run(job, data, 4 * num_samples)
        return DecodedAudio(np.frombuffer(result, np.float32), sample_rate_hz)

    async def _run(
        self, job: dict[str, Any], data: bytes, result_bytes: int
    ) -> tuple[dict[str, Any], mmap.mmap]:
        if result_bytes < 1 or 2 * len(data) + result_bytes > self._memory_bytes:
            raise BadMediaError(
                f"decoding {len(data)} bytes to {result_bytes} needs more than the {self._memory_bytes >> 20} MiB a decode "
                "may use; send a smaller one or ask for fewer frames"
            )
        message = json.dumps(job).encode()
        if len(message) > MAX_MESSAGE_BYTES:
            raise BadMediaError(
                f"{len(message)} bytes of decode instructions are too many; ask for fewer frames"
            )
        if self._closed:
            raise OverloadedError(STOPPING)
        slot = await self._free.get()
        try:
            with _shared_memory(len(data)) as source, _shared_memory(result_bytes) as result:
                await asyncio.to_thread(_write, source, data)
                reply = await self._attempt(slot, message, [source, result])
                return reply, mmap.mmap(result, result_bytes)
        finally:
            self._free.put_nowait(slot)

    async def _attempt(self, slot: _Slot, message: bytes, descriptors: list[int]) -> dict[str, Any]:
        decoder = await self._hand_over(slot, message, descriptors)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                reply = await decoder.receive()
        except TimeoutError as error:
            slot.discard()
            raise BadMediaError(
                f"decoding took longer than {self._timeout_seconds} seconds; send a smaller one, or raise "
                "spec.gateway.media.decodeTimeoutSeconds"
            ) from error
        except _ProcessLostError as error:
            try:
                status = await decoder.ended()
            finally:
                slot.discard()
            if self._closed:
                raise OverloadedError(STOPPING) from error
            log.warning("decode process %d ended with %s", decoder.process.pid, _how(status))
            raise BadMediaError(
                f"the decoder died on this medium ({_how(status)}); send it re-encoded"
            ) from error
        except asyncio.CancelledError:
            slot.discard()
            raise
        if "bad_media" in reply:
            raise BadMediaError(reply["bad_media"])
        return reply

    async def _hand_over(self, slot: _Slot, message: bytes, descriptors: list[int]) -> _Decoder:
        """Give the job to the slot's process, a new one when it died while idle (which is no medium's fault)."""
        for _ in range(2):
            if self._closed:
                raise OverloadedError(STOPPING)
            if slot.decoder is None:
                slot.decoder = await self._spawn()
            decoder = slot.decoder
            try:
                async with asyncio.timeout(START_TIMEOUT_SECONDS):
                    socket.send_fds(decoder.control, [message], descriptors)
                    await decoder.receive()
            except (OSError, _ProcessLostError):
                slot.discard()
            except (asyncio.CancelledError, TimeoutError):
                slot.discard()
                raise
            else:
                return decoder
        raise OverloadedError(
            "decode processes die before they take a job; look at this worker's memory limit"
        )

    async def _spawn(self) -> _Decoder:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {"MALLOC_ARENA_MAX": "2"}  # arenas reserve address space, which is limited
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "mmd_workers.media.decode_process",
                str(theirs.fileno()),
                str(self._timeout_seconds),
                str(self._memory_bytes),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        self._started = {known for known in self._started if known.returncode is None} | {process}
        decoder = _Decoder(process, ours)
        try:
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                await decoder.receive()
        except (TimeoutError, _ProcessLostError) as error:
            decoder.kill()
            raise OverloadedError(
                "a decode process did not start; look at this worker's memory and log"
            ) from error
        except asyncio.CancelledError:
            decoder.kill()
            raise
        if self._closed:
            decoder.kill()
            raise OverloadedError(STOPPING)
        return decoder


def _how(status: int) -> str:
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"


@contextmanager
def _shared_memory(num_bytes: int) -> Iterator[int]:
    descriptor = os.memfd_create("mmd-media", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
        yield descriptor
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    with mmap.mmap(descriptor, len(data)) as mapped:
        mapped[:] = data
