"""Containers of sound other than those of the web: CAF, Wave64, BW64 and AU. Every sample counts, and a file that is cut off is refused."""

from __future__ import annotations

import io
import struct

import av
import numpy as np
import pytest

from mmd_api.contract.errors import BadMediaError
from mmd_api.spec.media import MediaPolicy
from mmd_workers.media.decode import decode_audio
from mmd_workers.media.probe import probe

from .hostile_files import file, pcm
from .media_samples import audio_bytes, tone

POLICY = MediaPolicy()
SAMPLES = 4_320  # FFmpeg counts the padding of Wave64 as sound
UNKNOWN = 2**32 - 1


def large_wave(kind: bytes) -> bytes:
    """A WAVE of 64-bit sizes: RF64 (EBU Tech 3306) or BW64 (ITU-R BS.2088)."""
    sound = (tone(SAMPLES, 16_000) * 32767).astype("<i2").tobytes()
    sizes = struct.pack("<QQQI", 0, len(sound), SAMPLES, 0)
    head = b"ds64" + struct.pack("<I", len(sizes)) + sizes + b"fmt " + struct.pack("<I", 16) + pcm()
    return kind + struct.pack("<I", UNKNOWN) + b"WAVE" + head + b"data" + struct.pack("<I", UNKNOWN) + sound


def made(container: str, codec: str = "pcm_s16le") -> bytes:
    if container in ("RF64", "BW64"):
        return large_wave(container.encode())
    return audio_bytes(codec, "s16", container, 16_000, SAMPLES)


KINDS = [("RF64", ""), ("BW64", ""), ("w64", "pcm_s16le"), ("caf", "pcm_s16be"), ("caf", "pcm_alaw"), ("au", "pcm_s16be"),
         ("au", "pcm_mulaw"), ("wav", "pcm_alaw")]  # fmt: skip


@pytest.mark.parametrize(("container", "codec"), KINDS)
def test_every_sample_is_counted_and_heard(container: str, codec: str) -> None:
    data = made(container, codec)
    info = probe(data, "audio", POLICY)
    assert (info.container, info.sample_rate_hz) == (
        "wav" if container in ("RF64", "BW64") else container,
        16_000,
    )
    assert info.num_samples == SAMPLES
    heard = decode_audio(data, info, 16_000, SAMPLES).waveform
    tolerance = 0.02 if codec in ("pcm_alaw", "pcm_mulaw") else 2.01 / 32768
    np.testing.assert_allclose(heard, tone(SAMPLES, 16_000), atol=tolerance)


@pytest.mark.parametrize(("container", "codec"), KINDS)
def test_a_sound_that_is_cut_off_is_refused_with_what_is_missing(container: str, codec: str) -> None:
    data = made(container, codec)
    with pytest.raises(
        BadMediaError, match=r"truncated: 1000 bytes that its header declares are missing; send"
    ):
        probe(data[:-1000], "audio", POLICY)


@pytest.mark.parametrize("container", ["caf", "au"])
def test_a_sound_of_unknown_length_is_heard_to_its_end(container: str) -> None:
    data = made(container, "pcm_s16be")
    sound = 2 * SAMPLES
    if container == "au":
        data = data[:8] + b"\xff" * 4 + data[12:]
    else:
        at = data.index(b"data") + 4
        data = data[:at] + b"\xff" * 8 + data[at + 8 :]
    assert probe(data, "audio", POLICY).num_samples == SAMPLES
    assert probe(data[: -sound // 2], "audio", POLICY).num_samples < SAMPLES


HEADERS = {
    "a caf without chunks": b"caff\0\1\0\0",
    "a caf whose chunk has less than nothing": b"caff\0\1\0\0desc" + struct.pack(">q", -5) + bytes(64),
    "a caf of 2^63 - 1 bytes": b"caff\0\1\0\0data" + struct.pack(">q", 2**63 - 1) + bytes(64),
    "a wave64 whose chunks have no size": bytes.fromhex("726966662e91cf11a5d628db04c10000") + bytes(4000),
    "an au of no header": b".snd",
    "an au whose sound begins behind its end": b".snd" + struct.pack(">5I", 2**32 - 2, 2**31, 1, 8000, 1) + bytes(64),
    "an au of four billion channels": b".snd" + struct.pack(">5I", 24, 64, 1, 8000, 2**32 - 1) + bytes(64),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_is_refused(name: str) -> None:
    with pytest.raises(BadMediaError, match="; "):
        probe(HEADERS[name], "audio", POLICY)


def in_caf(m4a: bytes, heard: int, priming: int) -> bytes:
    """AAC of an M4A in a CAF, as Apple's programs write it, with the samples of the encoder's delay."""
    with av.open(io.BytesIO(m4a)) as opened:
        stream = opened.streams.audio[0]
        settings, rate = bytes(stream.codec_context.extradata), stream.codec_context.sample_rate
        packets = [bytes(packet) for packet in opened.demux(stream) if packet.size]

    def part(name: bytes, body: bytes) -> bytes:
        return name + struct.pack(">q", len(body)) + body

    def descriptor(tag: int, body: bytes) -> bytes:
        return bytes([tag, 0x80, 0x80, 0x80, len(body)]) + body

    decoder = descriptor(4, b"\x40\x15" + bytes(11) + descriptor(5, settings))
    sizes = b"".join(
        bytes([128 | len(packet) >> 7, len(packet) & 127])[len(packet) < 128 :] for packet in packets
    )
    padding = 1024 * len(packets) - heard - priming
    return b"".join(
        (
            b"caff\0\1\0\0",
            part(b"desc", struct.pack(">d4sIIIII", rate, b"aac ", 2, 0, 1024, 1, 0)),
            part(b"kuki", descriptor(3, bytes(3) + decoder + descriptor(6, b"\2"))),
            part(b"pakt", struct.pack(">qqii", len(packets), heard, priming, padding) + sizes),
            part(b"data", bytes(4) + b"".join(packets)),
        )
    )


def test_the_delay_and_the_padding_of_aac_in_caf_are_not_heard() -> None:
    m4a = file("speech.m4a")
    expected = probe(m4a, "audio", POLICY)
    data = in_caf(m4a, expected.num_samples, 1024)
    info = probe(data, "audio", POLICY)
    assert (info.container, info.num_samples) == ("caf", expected.num_samples)
    heard = decode_audio(data, info, 44_100, info.num_samples).waveform
    np.testing.assert_array_equal(heard, decode_audio(m4a, expected, 44_100, info.num_samples).waveform)
