"""Decodes bytes from outside in separate processes: a crash, a hang or a decompression bomb costs one medium and one process.

Bytes and pixels pass through anonymous shared memory (memfd), never through pipes. Processes are reused, and so is the memory of
results: mapping, clearing and freeing the pages of a clip takes longer than writing its pixels.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import math
import mmap
import os
import signal
import socket
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmd_api.contract.errors import BadMediaError, OverloadedError
from mmd_api.contract.pools import Modality
from mmd_workers.media import decode, probe
from mmd_workers.media.choice import FoundFrame, FoundFrames, SamplingChoice
from mmd_workers.media.confinement import LAYERS
from mmd_workers.media.containers import CONTAINERS, DOCUMENT
from mmd_workers.media.decode_process import MAX_MESSAGE_BYTES
from mmd_workers.media.identity import digest
from mmd_workers.media.medium import DecodedAudio, DecodedImage, DecodedVideo, MediumInfo, MediumKind

if TYPE_CHECKING:
    from mmd_api.spec.media import MediaPolicy

log = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 30.0
ACCEPT_TIMEOUT_SECONDS = 30.0
CLOSE_TIMEOUT_SECONDS = 5.0
KEPT_BYTES = 256 << 20  # limit of released results that wait for reuse
SMALLEST_RESULT_BYTES = 1 << 16
EXIT_SECONDS = 5.0
STOPPING = "this worker is stopping; the decode can be done elsewhere"
PROGRAM = ("-I", "-B", "-m", "mmd_workers.media.decode_process")
_LIMITED = {"image", "video", "audio", "document"}
MEMORY_BYTES = 2 << 30  # default limit of one decode


class _ProcessLostError(Exception):
    """The decode process ended or never answered."""


@dataclass(slots=True)
class _Decoder:
    """A running decode process and this end of its socket (one message in, one out).

    `process` is the started process, `pid` the one that decodes: a child of it, if that could get its own namespaces.
    """

    process: asyncio.subprocess.Process
    control: socket.socket
    pid: int = 0

    async def receive(self) -> dict[str, Any]:
        try:
            message = await asyncio.get_running_loop().sock_recv(self.control, MAX_MESSAGE_BYTES)
        except OSError as error:
            raise _ProcessLostError from error
        if not message:
            raise _ProcessLostError
        reply: dict[str, Any] = json.loads(message)
        return reply

    async def ended(self) -> int | None:
        """Exit status of a process that closed its socket; a process that stays is killed.

        None: it survives even that; the kernel holds it, and waiting is pointless. The process is not killed at once: that would reap
        it behind asyncio's back, which would then report 255 instead of the true status.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_SECONDS):
                return await self.process.wait()
        self.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_SECONDS):
                return await self.process.wait()
        return None

    def kill(self) -> None:
        _kill(self.process, self.pid)
        self.control.close()


def _kill(process: asyncio.subprocess.Process, pid: int) -> None:
    """Kill the process that decodes. If it has a parent below this process, that parent sends SIGKILL, reaps it and ends."""
    if process.returncode is None:
        process.send_signal(signal.SIGKILL if pid in (0, process.pid) else signal.SIGTERM)


@dataclass(slots=True)
class _Slot:
    decoder: _Decoder | None = None

    def discard(self) -> None:
        """Kill the process; the next job starts a new one."""
        if self.decoder is not None:
            self.decoder.kill()
            self.decoder = None


class SharedMemory:
    """Anonymous shared memory of `num_bytes`, mapped here. Pages exist once they are written to, and vanish with the last holder."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create("mmd-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            # Shrinking it would kill this process at its next access (SIGBUS).
            fcntl.fcntl(
                self.descriptor,
                fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
            )
            self.mapped = mmap.mmap(self.descriptor, num_bytes)
        except BaseException:
            os.close(self.descriptor)
            raise

    def write(self, data: bytes) -> None:
        """Fill it with data of its size. It uses system calls, which need no fault for each page."""
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self.descriptor, view[done:], done)

    def close(self) -> None:
        """Release it; arrays over it keep their pages."""
        os.close(self.descriptor)


class ResultMemory:
    """Shared memory for results, reused as soon as no array holds it; at most `kept_bytes` wait for reuse.

    One thread may use it, but arrays may end in any thread.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._idle: deque[SharedMemory] = deque()  # the newest last

    def take(self, num_bytes: int) -> SharedMemory:
        """Memory for `num_bytes` or more, which may still contain an earlier result."""
        size = max(SMALLEST_RESULT_BYTES, 1 << (num_bytes - 1).bit_length())
        for idle in reversed(tuple(self._idle)):
            if idle.num_bytes == size:
                self._idle.remove(idle)
                return idle
        while self._idle and self._idle_bytes() + size > self._kept_bytes:  # sizes no longer requested
            self._idle.popleft().close()
        return SharedMemory(size)

    def array(self, memory: SharedMemory, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The result, uint8 [num_bytes]. Its memory is reused when its last view is released."""
        result = np.frombuffer(memory.mapped, np.uint8, num_bytes)
        weakref.finalize(result, self._give_back, memory).atexit = False
        return result

    def close(self) -> None:
        """Keep nothing from now on."""
        self._kept_bytes = 0
        while self._idle:
            self._idle.popleft().close()

    def _give_back(self, memory: SharedMemory) -> None:
        """Reuse or release memory. It runs inside whatever drops the array, even `take`: so there is no lock, and every step is one
        operation.
        """
        if self._idle_bytes() + memory.num_bytes > self._kept_bytes:
            memory.close()
        else:
            self._idle.append(memory)

    def _idle_bytes(self) -> int:
        return sum(idle.num_bytes for idle in tuple(self._idle))


class DecodePool:
    """Runs at most `processes` decodes at a time, each in a process that is reused until it fails; further callers wait.

    A decode may take `decode_timeout_seconds` of wall time and map `memory_bytes` beyond the idle process: the bytes
    twice, the result once, and what the decoder needs.
    """

    def __init__(self, processes: int, decode_timeout_seconds: int, memory_bytes: int = MEMORY_BYTES) -> None:
        self.processes = processes
        self._timeout_seconds = decode_timeout_seconds
        self._memory_bytes = memory_bytes
        self._slots = [_Slot() for _ in range(processes)]
        self._free: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        for slot in self._slots:
            self._free.put_nowait(slot)
        self._results = ResultMemory(KEPT_BYTES)
        self._started: dict[asyncio.subprocess.Process, int] = {}  # value: the PID that decodes
        self._program = PROGRAM
        self._closed = False
        self.layers: dict[str, bool] = {}  # confinement.LAYERS: whether the kernel and the pod allow each

    def set_timeout(self, decode_timeout_seconds: int) -> None:
        """Change how long a decode may take, from the next one on."""
        self._timeout_seconds = decode_timeout_seconds

    async def start(self) -> None:
        """Start every process, wait until each is ready, and log how well they are confined.

        Raises:
            OverloadedError: one did not start in time.
        """
        decoders = await asyncio.gather(*(self._spawn() for _ in self._slots))
        for slot, decoder in zip(self._slots, decoders, strict=True):
            slot.decoder = decoder
        refused = [f"{layer} ({LAYERS[layer]})" for layer in LAYERS if not self.layers.get(layer)]
        active = ", ".join(layer for layer in LAYERS if self.layers.get(layer)) or "none"
        if not (self.layers.get("seccomp") or self.layers.get("landlock")):
            log.warning("decode processes can open files and sockets; active layers: %s; not available in this kernel or pod: %s",
                        active, "; ".join(refused))  # fmt: skip
        else:
            log.info("decode processes are confined by: %s; not available in this kernel or pod: %s",
                     active, "; ".join(refused) or "nothing")  # fmt: skip

    async def close(self) -> None:
        """Kill every process and wait until all have exited; decodes in flight fail with OverloadedError."""
        self._closed = True
        self._results.close()
        for process, pid in self._started.items():
            _kill(process, pid)
        async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
            await asyncio.gather(*(process.wait() for process in self._started))
            for _ in self._slots:  # a job in flight first sees its socket end, then returns its slot
                (await self._free.get()).discard()

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes that decode."""
        return [slot.decoder.pid for slot in self._slots if slot.decoder is not None]

    async def probe(
        self, data: bytes, modality: Modality, policy: MediaPolicy, page: int = 0, of_video: bool = False
    ) -> MediumInfo:
        """Run `media.probe.probe` in a decode process. Raises BadMediaError, OverloadedError.

        Identity and length come from the bytes themselves, computed here: a compromised decoder cannot pass one medium off as
        another.
        """
        kind = probe.kind_of_file(modality, page, of_video)
        if not data or len(data) > getattr(policy, kind).max_bytes:
            return probe.probe(data, modality, policy, page=page, of_video=of_video)  # refuses it unopened
        sha256 = await asyncio.to_thread(digest, data)
        limits = policy.model_dump(include=_LIMITED)
        job = {"kind": "probe", "modality": modality, "policy": limits, "digest": sha256, "page": page}
        job["of_video"] = of_video
        reply, _ = await self._run(job, data, 1)
        info = replace(
            MediumInfo(**reply["info"]),
            modality=modality,
            digest=sha256,
            num_bytes=len(data),
            of_video=of_video,
        )
        if info.page != page or not _possible(info, policy):
            raise _inconsistent(kind)
        return info

    async def find_frames(self, data: bytes, info: MediumInfo, choice: SamplingChoice) -> FoundFrames:
        """Run `media.frames.find_frames` in a decode process. Raises BadMediaError, OverloadedError."""
        job = {
            "kind": "frames",
            "info": asdict(info),
            "sampling": choice.sampling,
            "timestamps": choice.timestamps,
        }
        reply, _ = await self._run(job, data, 1)
        selections = _found(reply["frames"], info), _found(reply["spare"], info)
        if selections[0] is None or selections[1] is None:
            raise BadMediaError("the decoder returned inconsistent frames of this video; re-encode the file")
        return FoundFrames(selections[0], selections[1])

    async def probe_pages(self, data: bytes, pages: str, policy: MediaPolicy) -> list[MediumInfo]:
        """Run `media.probe.probe_pages` in a decode process, for as many pages as a request may have.

        Raises BadMediaError, OverloadedError. Identity comes from the bytes, as in `probe`.
        """
        most = min(policy.max_items_per_request, policy.document.max_pages)
        if not data or len(data) > policy.document.max_bytes:
            return probe.probe_pages(data, pages, most, policy)  # refuses without opening it
        sha256 = await asyncio.to_thread(digest, data)
        limits = policy.model_dump(include=_LIMITED)
        reply, _ = await self._run({"kind": "pages", "pages": pages, "most": most, "policy": limits}, data, 1)
        infos = [
            MediumInfo("image", sha256, len(data), DOCUMENT, width=width, height=height, page=page)
            for page, width, height in reply["pages"]
        ]
        numbers = [info.page for info in infos]
        ascending = all(type(number) is int and number > 0 for number in numbers) and numbers == sorted(
            set(numbers)
        )
        if not (0 < len(infos) <= most and ascending and all(_possible(info, policy) for info in infos)):
            raise _inconsistent("document")
        return infos

    async def decode_image(self, data: bytes, info: MediumInfo) -> DecodedImage:
        """Run `media.decode.decode_image` in a decode process. Raises BadMediaError, OverloadedError."""
        shape = decode.image_shape(info)
        _, result = await self._run({"kind": "image", "info": asdict(info)}, data, int(np.prod(shape)))
        return DecodedImage(result.reshape(shape))

    async def decode_video(self, data: bytes, info: MediumInfo, frame_indices: Sequence[int]) -> DecodedVideo:
        """Run `media.decode.decode_video` in a decode process. Raises BadMediaError, OverloadedError."""
        indices = list(frame_indices)
        shape = decode.video_shape(info, indices)
        job = {"kind": "video", "info": asdict(info), "frame_indices": indices}
        _, result = await self._run(job, data, int(np.prod(shape)))
        return DecodedVideo(result.reshape(shape), indices, info.fps, info.num_frames)

    async def decode_audio(
        self, data: bytes, info: MediumInfo, sample_rate_hz: int, num_samples: int
    ) -> DecodedAudio:
        """Run `media.decode.decode_audio` in a decode process. Raises BadMediaError, OverloadedError."""
        job = {
            "kind": "audio",
            "info": asdict(info),
            "sample_rate_hz": sample_rate_hz,
            "num_samples": num_samples,
        }
        _, result = await self._run(job, data, 4 * num_samples)
        return DecodedAudio(result.view(np.float32), sample_rate_hz)

    async def _run(
        self, job: dict[str, Any], data: bytes, result_bytes: int
    ) -> tuple[dict[str, Any], npt.NDArray[np.uint8]]:
        if result_bytes < 1 or 2 * len(data) + result_bytes > self._memory_bytes:
            raise BadMediaError(
                f"decoding {len(data)} bytes to {result_bytes} needs more than the {self._memory_bytes >> 20} MiB that a decode "
                "may use; send a smaller file, or request fewer frames"
            )
        message = json.dumps(job | {"result_bytes": result_bytes}).encode()
        if len(message) > MAX_MESSAGE_BYTES:
            raise BadMediaError(
                f"{len(message)} bytes of decode instructions are too many; request fewer frames"
            )
        if self._closed:
            raise OverloadedError(STOPPING)
        slot = await self._free.get()
        try:
            memory = self._results.take(result_bytes)
            try:
                with closing(SharedMemory(len(data))) as source:
                    await asyncio.to_thread(source.write, data)
                    reply = await self._attempt(slot, message, [source.descriptor, memory.descriptor])
            except BaseException:
                memory.close()  # its process may still write
                raise
            return reply, self._results.array(memory, result_bytes)
        finally:
            self._free.put_nowait(slot)

    async def _attempt(self, slot: _Slot, message: bytes, descriptors: list[int]) -> dict[str, Any]:
        decoder = await self._hand_over(slot, message, descriptors)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                reply = await decoder.receive()
                if "died_of" in reply:
                    log.warning("decode process %d: %r", decoder.pid, reply["died_of"])
                    raise _ProcessLostError
        except TimeoutError as error:
            slot.discard()
            raise BadMediaError(
                f"decoding took longer than {self._timeout_seconds} seconds; send a smaller file, or raise "
                "spec.gateway.media.decodeTimeoutSeconds"
            ) from error
        except _ProcessLostError as error:
            try:
                status = await decoder.ended()
            finally:
                slot.discard()
            if self._closed:
                raise OverloadedError(STOPPING) from error
            if status is None:
                log.warning("decode process %d did not exit after SIGKILL; abandoning it", decoder.pid)
                raise BadMediaError(
                    "the decoder hung on this medium and could not be killed; re-encode the file"
                ) from error
            log.warning("decode process %d exited with %s", decoder.pid, _how(status))
            raise BadMediaError(
                f"the decoder crashed on this medium ({_how(status)}); re-encode the file"
            ) from error
        except asyncio.CancelledError:
            slot.discard()
            raise
        if "bad_media" in reply:
            raise BadMediaError(reply["bad_media"])
        return reply

    async def _hand_over(self, slot: _Slot, message: bytes, descriptors: list[int]) -> _Decoder:
        """Give the job to the slot's process, or to a new one if that died or hung while idle (which is no medium's fault)."""
        fault = ""
        for _ in range(2):
            if self._closed:
                raise OverloadedError(STOPPING)
            if slot.decoder is None:
                slot.decoder = await self._spawn()
            decoder = slot.decoder
            try:
                async with asyncio.timeout(ACCEPT_TIMEOUT_SECONDS):
                    socket.send_fds(decoder.control, [message], descriptors)
                    await decoder.receive()
            except TimeoutError:
                slot.discard()
                fault = f"did not accept a job within {ACCEPT_TIMEOUT_SECONDS:g} s; check this worker's CPU and memory"
            except (OSError, _ProcessLostError):
                slot.discard()
                fault = "exit before they accept a job; check this worker's memory limit"
            except asyncio.CancelledError:
                slot.discard()
                raise
            else:
                return decoder
        raise OverloadedError(f"decode processes {fault}")

    async def _spawn(self) -> _Decoder:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *self._program,
                str(theirs.fileno()),
                str(self._timeout_seconds),
                str(self._memory_bytes),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={},
            )
        self._started = {p: pid for p, pid in self._started.items() if p.returncode is None} | {process: 0}
        decoder = _Decoder(process, ours)
        try:
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                decoder.pid = self._started[process] = int((await decoder.receive())["pid"])
                self.layers = dict((await decoder.receive())["layers"])
        except (TimeoutError, _ProcessLostError) as error:
            decoder.kill()
            raise OverloadedError(
                "a decode process did not start; check this worker's memory limit and log"
            ) from error
        except asyncio.CancelledError:
            decoder.kill()
            raise
        if self._closed:
            decoder.kill()
            raise OverloadedError(STOPPING)
        return decoder


def _inconsistent(kind: MediumKind) -> BadMediaError:
    return BadMediaError(f"the decoder returned inconsistent data about this {kind}; re-encode the file")


def _possible(info: MediumInfo, policy: MediaPolicy) -> bool:
    """Whether facts from a decode process have the right types and are within its limits."""
    counts = (info.width, info.height, info.num_frames, info.num_samples, info.sample_rate_hz)
    figures = (info.fps, info.duration_seconds)
    if not all(type(n) is int and n >= 0 for n in counts) or type(info.has_sound) is not bool:
        return False
    if not all(isinstance(x, (int, float)) and math.isfinite(x) and x >= 0 for x in figures):
        return False
    containers = frozenset({DOCUMENT}) if info.page else CONTAINERS[info.modality]
    if info.container not in containers:
        return False
    if info.modality == "audio":
        seconds = policy.audio.max_duration_seconds
        return info.sample_rate_hz > 0 and 0 < info.num_samples <= seconds * info.sample_rate_hz
    if not 0 < info.width * info.height <= policy.image.max_pixels:
        return False
    return info.modality == "image" or (
        info.num_frames > 0 and info.fps > 0 and info.duration_seconds <= policy.video.max_duration_seconds
    )


def _found(pairs: Any, info: MediumInfo) -> tuple[FoundFrame, ...] | None:
    """Frames from a decode process; None if they are not of this video, or out of order."""
    previous = (-1, 0)
    for pair in pairs:
        if not (len(pair) == 2 and all(type(n) is int and n < info.num_frames for n in pair)):
            return None
        if pair[0] <= previous[0] or pair[1] < previous[1]:
            return None
        previous = (pair[0], pair[1])
    return tuple(FoundFrame(index, nominal) for index, nominal in pairs)


def _how(status: int) -> str:
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"
