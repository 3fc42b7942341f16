"""A medium that crashes, hangs or bloats its decoder costs that medium and that process, and nothing else."""

import asyncio
import functools
import io
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from mmd_api.contract.errors import BadMediaError, OverloadedError
from mmd_api.spec.media import AudioPolicy, MediaPolicy
from mmd_workers.media import sandbox
from mmd_workers.media.decode import decode_audio, decode_image
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.probe import probe
from mmd_workers.media.sandbox import DecodePool, ResultMemory
from support.harness.waiting import until
from support.oracles.films import film
from support.serving.mutations import media_memory

from .media_samples import audio_bytes, image_bytes, number_of, png_claiming, video_bytes

POLICY = MediaPolicy()
MIB = 2**20


@pytest_asyncio.fixture
async def pool():
    pool = DecodePool(processes=1, decode_timeout_seconds=20, memory_bytes=256 * MIB)
    await pool.start()
    yield pool
    await pool.close()


def gone(pid):
    return not Path(f"/proc/{pid}").exists()


@functools.cache
def slow_video():
    """A video of noise in 2 megapixel frames: the better part of a second to decode."""
    noise = np.random.default_rng(0).integers(0, 255, (1080, 1920, 3), np.uint8)
    return video_bytes(
        "mpeg4",
        "mp4",
        options={"b": "80M", "g": "300"},
        frames=20,
        width=1920,
        height=1080,
        draw=lambda i, w, h: np.roll(noise, i * 64, 1),
    )


async def test_all_three_modalities_come_back_as_they_do_without_the_sandbox(pool):
    image, video, audio = image_bytes("JPEG"), video_bytes(), audio_bytes()
    first = pool.process_ids
    info = await pool.probe(image, "image", POLICY)
    assert info == probe(image, "image", POLICY)
    np.testing.assert_array_equal(
        (await pool.decode_image(image, info)).pixels, decode_image(image, info).pixels
    )
    clip = await pool.decode_video(video, await pool.probe(video, "video", POLICY), [7, 3])
    assert [number_of(f) for f in clip.frames] == [7, 3]
    info = probe(audio, "audio", POLICY)
    heard = await pool.decode_audio(audio, info, 16000, 16000)
    np.testing.assert_array_equal(heard.waveform, decode_audio(audio, info, 16000, 16000).waveform)
    assert pool.process_ids == first  # reused


async def test_a_videos_sound_is_the_same_inside_and_outside_the_sandbox(pool):
    data = film(2, 1.5)
    policy = MediaPolicy(audio=AudioPolicy(max_bytes=1024))
    assert (await pool.probe(data, "video", policy)).has_sound
    info = await pool.probe(data, "audio", policy, of_video=True)
    assert info == probe(data, "audio", policy, of_video=True)
    heard = await pool.decode_audio(data, info, 16000, 24000)
    np.testing.assert_array_equal(heard.waveform, decode_audio(data, info, 16000, 24000).waveform)
    with pytest.raises(BadMediaError, match=r"audio\.maxBytes"):
        await pool.probe(data, "audio", policy)


async def test_a_result_in_reused_memory_stays_intact_while_it_is_held(pool):
    light, dark = (image_bytes("PNG", np.full((300, 400, 3), value, np.uint8)) for value in (250, 5))
    infos = [probe(data, "image", POLICY) for data in (light, dark)]
    first = (await pool.decode_image(light, infos[0])).pixels[10:20]
    second = (await pool.decode_image(dark, infos[1])).pixels
    assert (first == 250).all()
    assert (second == 5).all()
    del second
    small = image_bytes("PNG", np.full((299, 399, 3), 77, np.uint8))
    assert ((await pool.decode_image(small, probe(small, "image", POLICY))).pixels == 77).all()
    assert (first == 250).all()


def test_memory_of_a_result_is_reused_when_its_last_view_is_released():
    memory = ResultMemory(kept_bytes=4 * MIB)
    first = memory.take(700_000)
    view = memory.array(first, 700_000)[1:].reshape(-1, 3)[5:]
    assert memory.take(700_000) is not first
    view[:] = 9
    del view
    again = memory.take(1_000_000)
    assert again is first
    assert memory.array(again, 16)[15] == 0
    assert memory.take(100_000) is not first


def test_pooled_result_memory_is_bounded_and_makes_room_for_requested_sizes():
    before = media_memory()

    def num_new():
        return len(media_memory() - before)

    memory = ResultMemory(kept_bytes=4 * MIB)
    held = [memory.array(memory.take(MIB), MIB) for _ in range(9)]
    assert num_new() == 9
    held.clear()
    assert num_new() == 4
    result = memory.array(memory.take(2 * MIB), 1)
    assert num_new() == 3
    del result
    memory.array(memory.take(8 * MIB), 1)
    assert num_new() == 0
    memory.array(memory.take(MIB), 1)
    assert num_new() == 1
    memory.close()
    memory.array(memory.take(MIB), 1)
    assert num_new() == 0


async def test_refusals_keep_their_words_and_the_process(pool):
    first = pool.process_ids
    with pytest.raises(BadMediaError, match="maxPixels"):
        await pool.probe(png_claiming(50_000, 50_000), "image", POLICY)
    whole = image_bytes("PNG", np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    with pytest.raises(BadMediaError, match="cannot be decoded"):
        await pool.decode_image(whole[:4000], probe(whole, "image", POLICY))
    assert pool.process_ids == first


async def test_an_image_beyond_the_decode_memory_is_refused_before_decoding(pool):
    lying = MediumInfo("image", "", 0, "png", width=20_000, height=20_000)
    with pytest.raises(BadMediaError, match="256 MiB"):
        await pool.decode_image(png_claiming(20_000, 20_000), lying)


async def test_memory_beyond_the_limit_fails_the_medium_and_the_pool_keeps_working(pool):
    # 144 million white pixels in a small file: the promise is tiny, so the pool lets it start; as RGB it needs 432 MB.
    out = io.BytesIO()
    Image.new("L", (12_000, 12_000), 255).save(out, "PNG", compress_level=1)
    lying = MediumInfo("image", "", 0, "png", width=10, height=10)
    with pytest.raises(BadMediaError, match="256 MiB it may use"):
        await pool.decode_image(out.getvalue(), lying)
    good = image_bytes("PNG")
    assert (await pool.decode_image(good, probe(good, "image", POLICY))).pixels.shape == (48, 64, 3)


async def test_a_decode_over_its_time_is_killed_and_the_next_one_works():
    pool = DecodePool(processes=1, decode_timeout_seconds=1, memory_bytes=1024 * MIB)
    await pool.start()
    (pid,) = pool.process_ids
    try:
        large = slow_video()
        info = probe(large, "video", POLICY)
        pool._timeout_seconds = 0.05
        with pytest.raises(BadMediaError, match="decodeTimeoutSeconds"):
            await pool.decode_video(large, info, list(range(20)))
        assert pid not in pool.process_ids
        pool._timeout_seconds = 10
        good = image_bytes("PNG")
        assert (await pool.decode_image(good, probe(good, "image", POLICY))).pixels.shape == (48, 64, 3)
    finally:
        await pool.close()
    assert gone(pid)


async def test_a_decoder_killed_in_the_middle_fails_that_medium_only():
    pool = DecodePool(processes=2, decode_timeout_seconds=20, memory_bytes=1024 * MIB)
    await pool.start()
    before = pool.process_ids
    try:
        large, good = slow_video(), image_bytes("PNG")
        info = probe(large, "video", POLICY)
        doomed = asyncio.create_task(pool.decode_video(large, info, list(range(20))))
        busy = await _busy(before)
        os.kill(busy, signal.SIGKILL)
        with pytest.raises(BadMediaError, match="SIGKILL"):
            await doomed
        others = await asyncio.gather(
            *(pool.decode_image(good, probe(good, "image", POLICY)) for _ in range(6))
        )
        assert all(o.pixels.shape == (48, 64, 3) for o in others)
        assert busy not in pool.process_ids
        assert len(pool.process_ids) == 2
    finally:
        await pool.close()


async def _busy(pids):
    """The process that burns CPU."""
    start = {pid: _cpu_ticks(pid) for pid in pids}
    return await until(lambda: next((pid for pid in pids if _cpu_ticks(pid) > start[pid] + 5), None))


def _cpu_ticks(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


async def test_a_decoder_that_died_while_idle_is_replaced_without_blaming_the_medium(pool):
    (pid,) = pool.process_ids
    os.kill(pid, signal.SIGKILL)
    good = image_bytes("PNG")
    assert (await pool.decode_image(good, probe(good, "image", POLICY))).pixels.shape == (48, 64, 3)


async def test_a_cancelled_decode_frees_its_place(pool):
    large = slow_video()
    info = probe(large, "video", POLICY)
    task = asyncio.create_task(pool.decode_video(large, info, list(range(8))))
    (pid,) = pool.process_ids
    await _busy([pid])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    good = image_bytes("PNG")
    assert (await pool.decode_image(good, probe(good, "image", POLICY))).pixels.shape == (48, 64, 3)


async def test_closing_leaves_no_process_and_fails_work_as_retryable():
    pool = DecodePool(processes=2, decode_timeout_seconds=20, memory_bytes=1024 * MIB)
    await pool.start()
    pids = pool.process_ids
    large = slow_video()
    info = probe(large, "video", POLICY)
    tasks = [asyncio.create_task(pool.decode_video(large, info, list(range(20)))) for _ in range(3)]
    await _busy(pids)
    await pool.close()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(o) for o in outcomes] == [OverloadedError] * 3
    assert all(gone(pid) for pid in pids)


async def test_a_decoder_is_small_and_bounded(pool):
    (pid,) = pool.process_ids
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    limits = {
        line[:25].strip(): line[25:].split()[0]
        for line in Path(f"/proc/{pid}/limits").read_text().splitlines()
    }
    assert limits["Max core file size"] == "0"
    assert limits["Max file size"] == "0"
    assert int(limits["Max open files"]) <= 32
    assert int(limits["Max address space"]) < 2**40
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    assert resident < 150 * MIB


STAYS = """
import json, os, signal, socket, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
control = socket.socket(fileno=int(sys.argv[1]))
control.send(json.dumps({"pid": os.getpid() + 1}).encode())
control.send(json.dumps({"ready": True, "layers": {}}).encode())
control.recv(1 << 17)
control.send(b'{"started": true}')
control.close()
signal.pause()
"""


async def test_an_unkillable_process_costs_its_medium_but_keeps_no_slot(monkeypatch, caplog):
    """As one does that hangs in the kernel, where no signal reaches it; this one ignores the signal that its kind is sent."""
    monkeypatch.setattr(sandbox, "EXIT_SECONDS", 0.1)
    pool = DecodePool(processes=1, decode_timeout_seconds=60, memory_bytes=256 * MIB)
    working, pool._program = pool._program, ("-I", "-B", "-c", STAYS)
    await pool.start()
    (stuck,) = pool._started
    try:
        async with asyncio.timeout(60):
            with pytest.raises(BadMediaError, match="could not be killed"):
                await pool.probe(image_bytes("JPEG"), "image", POLICY)
            assert stuck.returncode is None
            pool._program = working
            assert (await pool.probe(image_bytes("JPEG"), "image", POLICY)).width
        assert f"decode process {stuck.pid + 1} did not exit" in caplog.text
    finally:
        os.kill(stuck.pid, signal.SIGKILL)
        await stuck.wait()
        await pool.close()


async def test_decode_processes_that_do_not_accept_a_job_are_reported_as_such(pool, monkeypatch):
    monkeypatch.setattr(sandbox, "ACCEPT_TIMEOUT_SECONDS", 0.5)  # which stopped processes never meet
    spawn = pool._spawn

    async def spawn_stuck():
        decoder = await spawn()
        os.kill(decoder.pid, signal.SIGSTOP)
        return decoder

    monkeypatch.setattr(pool, "_spawn", spawn_stuck)
    (pid,) = pool.process_ids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(OverloadedError, match=r"decode processes did not accept a job within 0.5 s"):
        await pool.probe(image_bytes("JPEG"), "image", POLICY)
    await until(lambda: gone(pid))
