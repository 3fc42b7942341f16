"""What probe promises from headers, decode delivers to the pixel and sample."""

import contextlib
import dataclasses
import gc
import io
import logging
import struct
import wave
import weakref

import av
import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from mmd_api.contract.errors import BadMediaError
from mmd_api.spec.media import AudioPolicy, ImagePolicy, MediaPolicy, VideoPolicy
from mmd_workers.media import containers, pictures
from mmd_workers.media import decode as decode_module
from mmd_workers.media.decode import decode_audio, decode_image, decode_video
from mmd_workers.media.probe import probe, resampled_num_samples
from support.oracles.films import film

from .field_pictures import field_video
from .media_samples import (
    AUDIO_KINDS,
    VIDEO_KINDS,
    audio_bytes,
    frame_pixels,
    image_bytes,
    number_of,
    picture,
    png_claiming,
    tone,
    video_bytes,
)

POLICY = MediaPolicy()
W64_HEAD = bytes.fromhex("726966662e91cf11a5d628db04c10000")


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_an_image_decodes_to_the_size_its_header_declares(fmt):
    data = image_bytes(fmt)
    info = probe(data, "image", POLICY)
    assert (info.width, info.height, info.container) == (64, 48, fmt.lower())
    pixels = decode_image(data, info).pixels
    assert pixels.shape == (48, 64, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels[4:20, 4:28].astype(int).mean((0, 1)) - [255, 0, 0]).max() < 12


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_orientation_is_in_the_promised_size_and_in_the_pixels(turn):
    data = image_bytes("PNG", orientation=turn)
    info = probe(data, "image", POLICY)
    assert (info.width, info.height) == ((48, 64) if turn >= 5 else (64, 48))
    oracle = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    np.testing.assert_array_equal(decode_image(data, info).pixels, oracle)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("described", ["tag", "xmp"])
def test_a_tiff_is_turned_by_its_tag_or_else_by_xmp(described, turn):
    tags = {274: turn} if described == "tag" else {700: f'<x tiff:Orientation="{turn}"/>'.encode()}
    data = image_bytes("TIFF", tiffinfo=tags)
    info = probe(data, "image", POLICY)
    assert (info.width, info.height) == ((48, 64) if turn >= 5 else (64, 48))
    oracle = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    np.testing.assert_array_equal(decode_image(data, info).pixels, oracle)


@pytest.mark.parametrize("fmt", ["GIF", "WEBP", "PNG"])
def test_of_an_animated_image_the_first_frame_counts(fmt):
    first, second = picture(), 255 - picture()
    extra = {"lossless": True} if fmt == "WEBP" else {}
    data = image_bytes(
        fmt, first, save_all=True, append_images=[Image.fromarray(second)], duration=100, **extra
    )
    np.testing.assert_array_equal(decode_image(data, probe(data, "image", POLICY)).pixels, first)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 95, "subsampling": 0}])
def test_a_jpeg_may_lack_its_end_marker_but_no_pixels(options):
    noise = np.random.default_rng(1).integers(0, 255, (64, 64, 3), np.uint8)
    data = image_bytes("JPEG", noise, **options)
    info = probe(data, "image", POLICY)
    whole = decode_image(data, info).pixels
    for missing in (1, 2):
        np.testing.assert_array_equal(decode_image(data[:-missing], info).pixels, whole)
    for missing in (3, 10, len(data) // 2):
        with pytest.raises(BadMediaError, match="truncated"):
            decode_image(data[:-missing], info)


@pytest.mark.parametrize("zipped", [False, True])
def test_texts_and_profiles_of_a_png_may_be_of_any_size(zipped):
    texts = PngImagePlugin.PngInfo()
    texts.add_text("drawing", "x" * 3_000_000, zip=zipped)
    texts.add_itxt("workflow", "y" * 3_000_000, zip=zipped)
    data = image_bytes("PNG", pnginfo=texts, icc_profile=bytes(2_000_000), orientation=6)
    info = probe(data, "image", POLICY)
    assert (info.width, info.height) == (48, 64)
    np.testing.assert_array_equal(decode_image(data, info).pixels, np.rot90(picture(), k=-1))


def test_a_one_pixel_image_and_an_image_with_transparency_are_rgb():
    for mode, size in (("L", (1, 1)), ("RGBA", (9, 5)), ("P", (7, 7)), ("CMYK", (8, 8))):
        out = io.BytesIO()
        Image.new(mode, size).save(out, "JPEG" if mode == "CMYK" else "PNG")
        data = out.getvalue()
        assert decode_image(data, probe(data, "image", POLICY)).pixels.shape == (size[1], size[0], 3)


@pytest.mark.parametrize(("codec", "container", "options"), VIDEO_KINDS)
def test_every_frame_of_a_video_is_counted_and_found_by_its_index(codec, container, options):
    data = video_bytes(codec, container, options=options)
    info = probe(data, "video", POLICY)
    assert (info.num_frames, info.width, info.height) == (60, 64, 48)
    assert info.fps == pytest.approx(30, rel=0.001)
    assert info.duration_seconds == pytest.approx(2, rel=0.001)
    for wanted in (list(range(60)), [0, 29, 59], [59], [3, 3, 41], [17]):
        clip = decode_video(data, info, wanted)
        assert clip.frames.shape == (len(wanted), 48, 64, 3)
        assert [number_of(f) for f in clip.frames] == wanted
        assert (clip.indices, clip.source_num_frames) == (wanted, 60)


def test_far_apart_frames_are_found_without_decoding_the_runs_between(monkeypatch):
    data = video_bytes(options={"g": "10", "sc_threshold": "0"}, frames=90)
    info = probe(data, "video", POLICY)
    monkeypatch.setattr(decode_module, "_decode_scan", lambda *_: pytest.fail("scanned the whole video"))
    assert [number_of(f) for f in decode_video(data, info, [5, 47, 89]).frames] == [5, 47, 89]


def every_frame(data):
    """What FFmpeg makes of a whole video."""
    with av.open(io.BytesIO(data)) as opened:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)])


def table_of(data, info):
    with containers.open_av(data, info.container, packets_only=True) as opened:
        return containers.video_table(opened, containers.video_stream(opened, info.container), 10_000)


def drifting(i, w, h):
    """Noise that moves on by a pixel a frame: every picture is predicted from others, and none is like another."""
    noise = np.random.default_rng(0).integers(0, 255, (h, w + 60, 3), dtype=np.uint8)
    return np.ascontiguousarray(noise[:, i : i + w])


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
@pytest.mark.parametrize(
    "options",
    [
        {"g": "12", "bf": "3", "x264-params": "open-gop=1"},
        {"g": "12", "bf": "0"},
        {"bf": "3"},
        {"bf": "5", "x264-params": "b-pyramid=none:b-adapt=0"},
        {"bf": "5", "x264-params": "b-pyramid=strict:b-adapt=0"},
        {"bf": "2", "x264-params": "intra-refresh=1:keyint=20"},
        {"bf": "3", "x264-params": "tff=1"},
        {"bf": "3", "x264-params": "slices=4", "tune": "zerolatency"},
    ],
    ids=lambda options: " ".join(options.values()),
)
def test_what_is_skipped_leaves_the_very_pixels_of_a_full_decode(options, container):
    data = video_bytes(container=container, options=options, draw=drifting)
    info = probe(data, "video", POLICY)
    everything = every_frame(data)
    assert len(everything) == info.num_frames == 60
    assert not table_of(data, info).misplaced
    rng = np.random.default_rng(1)
    some = [sorted(rng.choice(60, count, replace=False).tolist()) for count in (1, 2, 4, 8, 16, 32)]
    for wanted in ([30], [11, 13, 50], [59], list(range(0, 60, 4)), list(range(60)), *some):
        np.testing.assert_array_equal(decode_video(data, info, wanted).frames, everything[wanted])


def test_an_unwanted_and_unneeded_picture_is_not_even_looked_at():
    data = bytearray(video_bytes(options={"bf": "3", "x264-params": "b-adapt=0:cabac=0"}, draw=drifting))
    info, everything = probe(bytes(data), "video", POLICY), every_frame(bytes(data))
    with av.open(io.BytesIO(data)) as opened:
        packets = [(p.pts, p.pos, p.size, bytes(p)[4]) for p in opened.demux(video=0) if p.size]
    order = sorted(pts for pts, *_ in packets)
    spoilt = set()
    for pts, at, size, nal_header in packets:
        if nal_header & 0x60 == 0 and nal_header & 0x1F == 1:  # nal_ref_idc, and a slice
            spoilt.add(order.index(pts))
            data[at + 5 : at + size] = b"\xff" * (size - 5)
    assert len(spoilt) > 20
    whole = [index for index in range(60) if index not in spoilt]
    np.testing.assert_array_equal(decode_video(bytes(data), info, whole).frames, everything[whole])
    with pytest.raises(BadMediaError):
        decode_video(bytes(data), info, sorted(spoilt))


@pytest.mark.parametrize(
    ("picture", "header"),
    [(bytes(1 << 20), b"\x01\x64\x00\x1f\xff"), (b"\x00\x00\x01" * (1 << 20), b"")],
    ids=["lengths", "start codes"],
)
def test_of_a_picture_with_a_million_empty_units_few_are_looked_at(picture, header, monkeypatch):
    looked = []
    units = pictures.nal_units
    monkeypatch.setattr(
        pictures, "nal_units", lambda *own: (looked.append(unit) or unit for unit in units(*own))
    )
    assert list(pictures.intra_slices(picture, header)) == []
    assert 100 < len(looked) < 1000


def test_to_measure_a_video_no_picture_is_decoded():
    with containers.open_av(video_bytes(), "mp4", packets_only=True) as opened:
        assert (
            containers.video_stream(opened, "mp4").codec_context.format is None
        )  # FFmpeg learns it from pictures
    with containers.open_av(video_bytes(), "mp4") as opened:
        assert containers.video_stream(opened, "mp4").codec_context.format.name == "yuv420p"


def test_refusing_a_container_with_a_false_picture_size_names_both_sizes():
    data = bytearray(video_bytes())
    at = data.index(b"avc1", data.index(b"stsd")) + 28
    assert data[at : at + 4] == bytes([0, 64, 0, 48])
    data[at + 1] = 128
    info = probe(bytes(data), "video", POLICY)
    with pytest.raises(BadMediaError, match="is 64x48, but the container declares 128x48"):
        decode_video(bytes(data), info, [0])


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_turned_video_is_promised_and_decoded_as_displayed(degrees):
    data = video_bytes(rotation=degrees, draw=lambda i, w, h: picture(w, h))
    info = probe(data, "video", POLICY)
    with av.open(io.BytesIO(data)) as opened:
        frame = next(opened.decode(video=0))
        oracle = np.rot90(frame.to_ndarray(format="rgb24"), k=frame.rotation // 90)
        assert frame.rotation % 360 != 0
    np.testing.assert_array_equal(decode_video(data, info, [0]).frames[0], oracle)
    assert (info.height, info.width) == oracle.shape[:2]


@pytest.mark.parametrize(
    "matrix",
    [(1, 0, 0, 1), (-1, 0, 0, 1), (-1, 0, 0, -1), (1, 0, 0, -1), (0, 1, 1, 0), (0, 1, -1, 0), (0, -1, -1, 0), (0, -1, 1, 0)],
)  # fmt: skip
def test_a_track_is_turned_and_mirrored_by_its_matrix(matrix):
    """A point (x, y) is shown at (ax + cy, bx + dy): ISO/IEC 14496-12, 6.2.2."""
    data = bytearray(video_bytes(frames=2, draw=lambda i, w, h: picture(w, h)))
    at = data.index(b"tkhd") + 44
    a, b, c, d = matrix
    data[at : at + 36] = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    info = probe(bytes(data), "video", POLICY)
    stored = every_frame(bytes(data))[0]
    y, x = np.mgrid[: stored.shape[0], : stored.shape[1]]
    across, down = a * x + c * y, b * x + d * y
    shown = np.empty((np.ptp(down) + 1, np.ptp(across) + 1, 3), np.uint8)
    shown[down - down.min(), across - across.min()] = stored
    assert (info.height, info.width) == shown.shape[:2]
    np.testing.assert_array_equal(decode_video(bytes(data), info, [0]).frames[0], shown)


@pytest.mark.parametrize("track", [(1, 0, 0, 1), (-1, 0, 0, 1), (0, 1, -1, 0)])
def test_the_matrix_of_a_movie_follows_that_of_its_track(track):
    data = bytearray(video_bytes(frames=2, draw=lambda i, w, h: picture(w, h)))
    for box, offset, (a, b, c, d) in ((b"tkhd", 44, track), (b"mvhd", 40, (0, 1, -1, 0))):
        at = data.index(box) + offset
        data[at : at + 36] = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    info = probe(bytes(data), "video", POLICY)
    shown = every_frame(bytes(data))[0]
    if track == (-1, 0, 0, 1):
        shown = shown[:, ::-1]
    quarters = 2 if track == (0, 1, -1, 0) else 1
    np.testing.assert_array_equal(
        decode_video(bytes(data), info, [0]).frames[0], np.rot90(shown, k=-quarters)
    )
    assert (info.height, info.width) == ((48, 64) if quarters == 2 else (64, 48))


@pytest.mark.parametrize("packet_bytes", [188, 192, 204])
def test_a_transport_stream_has_packets_of_three_sizes(packet_bytes):
    timed = {"mpegts_m2ts_mode": "1"} if packet_bytes == 192 else {}
    data = video_bytes(container="mpegts", mux=timed)
    if packet_bytes == 204:  # with the check bytes of DVB, which receivers may keep
        data = b"".join(data[at : at + 188] + bytes(16) for at in range(0, len(data), 188))
    assert len(data) % packet_bytes == 0
    info = probe(data, "video", POLICY)
    assert (info.container, info.num_frames) == ("mpegts", 60)
    assert [number_of(frame) for frame in decode_video(data, info, [0, 31, 59]).frames] == [0, 31, 59]


@pytest.mark.parametrize("cut", [0, 40, 90])
@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("libx264", {"g": "12", "bf": "3", "x264-params": "open-gop=1:b-adapt=0"}),
        ("libx264", {"g": "12", "bf": "2"}),
        ("libx264", {"bf": "2", "x264-params": "intra-refresh=1:keyint=12"}),
        ("libx265", {"preset": "ultrafast", "x265-params": "open-gop=1:keyint=12:bframes=3:log-level=none"}),
        ("libx265", {"preset": "ultrafast", "x265-params": "keyint=12:bframes=3:open-gop=0:radl=2:log-level=none"}),
        ("mpeg2video", {"g": "12", "bf": "2", "b": "300k"}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value.values()),
)  # fmt: skip
def test_a_recording_that_begins_midway_has_all_decodable_frames(codec, options, cut):
    data = video_bytes(codec, "mpegts", options=options, draw=drifting, frames=50)
    if codec == "libx265":  # smaller
        cut //= 2
    data = data[188 * cut :]
    expected = every_frame(data)
    info = probe(data, "video", POLICY)
    assert 0 < info.num_frames == len(expected) <= 50
    everything = list(range(info.num_frames))
    np.testing.assert_array_equal(decode_video(data, info, everything).frames, expected)
    for index in (0, 1, info.num_frames // 2, info.num_frames - 1):
        np.testing.assert_array_equal(decode_video(data, info, [index]).frames[0], expected[index])


@pytest.mark.parametrize("fields_a_packet", [1, 2])
@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts", "avi"])
def test_two_fields_are_one_frame(container, fields_a_packet):
    data = field_video(container, 10, fields_a_packet)
    expected = every_frame(data)
    info = probe(data, "video", POLICY)
    assert info.num_frames == len(expected) == 10
    if container != "avi":  # its rate is that of the packets
        assert info.fps == pytest.approx(25)
    assert len({frame.mean() for frame in expected}) == 10
    for wanted in (list(range(10)), [0, 4, 9], *([index] for index in range(10))):
        np.testing.assert_array_equal(decode_video(data, info, wanted).frames, expected[wanted])


def test_frames_hidden_by_an_edit_list_are_not_counted():
    data = bytearray(video_bytes(options={"bf": "0"}, fps=30))
    at = data.index(b"elst") + 4
    # version/flags 4, count 4, then duration 4 and media time 4: start half a second in
    media_timescale = int.from_bytes(data[data.index(b"mdhd") + 16 :][:4], "big")
    data[at + 12 : at + 16] = (media_timescale // 2).to_bytes(4, "big")
    info = probe(bytes(data), "video", POLICY)
    assert info.num_frames == 45
    assert [number_of(f) for f in decode_video(bytes(data), info, [0, 44]).frames] == [15, 59]


def test_a_container_one_frame_short_repeats_its_last_and_logs_it(caplog):
    data = video_bytes(frames=20)
    info = dataclasses.replace(probe(data, "video", POLICY), num_frames=21)
    with caplog.at_level(logging.WARNING):
        clip = decode_video(data, info, [0, 19, 20])
    assert [number_of(f) for f in clip.frames] == [0, 19, 19]
    assert "repeated" in caplog.text
    with pytest.raises(BadMediaError, match="only 20 can be decoded"):
        decode_video(data, dataclasses.replace(info, num_frames=22), [21])


@pytest.mark.parametrize(("codec", "fmt", "container", "rate"), AUDIO_KINDS)
def test_audio_has_exactly_the_samples_that_were_counted(codec, fmt, container, rate):
    true = rate * 2 + 77
    data = audio_bytes(codec, fmt, container, rate, true)
    info = probe(data, "audio", POLICY)
    assert info.sample_rate_hz == rate
    assert abs(info.num_samples - true) <= (
        0 if container != "adts" else 2048
    )  # ADTS cannot tell its padding
    wanted = resampled_num_samples(info.num_samples, rate, 16000)
    heard = decode_audio(data, info, 16000, wanted).waveform
    assert heard.shape == (wanted,)
    assert heard.dtype == np.float32
    source = decode_audio(data, info, rate, info.num_samples).waveform
    assert source.shape == (info.num_samples,)
    spectrum = np.abs(np.fft.rfft(heard))
    assert abs(spectrum.argmax() * 16000 / len(heard) - 440) < 2
    if container not in ("adts",):
        middle = slice(rate // 2, rate)
        assert np.corrcoef(source[middle], tone(true, rate)[middle])[0, 1] > 0.98  # nothing is shifted


STREAMED = {
    "sox, espeak-ng": 0x7FFFF000,
    "arecord": 0x80000000,
    "wavenc of GStreamer": 0x7FFF0000,
    "ffmpeg": 0xFFFFFFFF,
    "no size": 0,
}


@pytest.mark.parametrize("size", STREAMED.values(), ids=STREAMED)
def test_a_wave_file_from_a_pipe_has_all_sound_up_to_its_end(size):
    data = bytearray(audio_bytes(rate=16000, num_samples=8000))
    at = data.index(b"data")
    data[at + 4 : at + 8] = size.to_bytes(4, "little")
    info = probe(bytes(data), "audio", POLICY)
    assert info.num_samples == 8000
    heard = decode_audio(bytes(data), info, 16000, 8000).waveform
    np.testing.assert_allclose(heard, tone(8000, 16000), atol=1.01 / 32768)


@pytest.mark.parametrize("rf64", ["never", "always"])
def test_a_wave_file_that_lacks_sound_is_refused_with_the_missing_bytes(rf64):
    out = io.BytesIO()
    with av.open(out, "w", format="wav", options={"rf64": rf64}) as file:
        stream = file.add_stream("pcm_s16le", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.ones((1, 8000), np.int16), format="s16", layout="mono")
        frame.sample_rate = 16000
        file.mux(stream.encode(frame))
    data = out.getvalue()
    assert data[:4] == (b"RF64" if rf64 == "always" else b"RIFF")
    assert probe(data, "audio", POLICY).num_samples == 8000
    with pytest.raises(BadMediaError, match="truncated: 6000 bytes that its header declares"):
        probe(data[:-6000], "audio", POLICY)


@pytest.mark.parametrize("cut", [1, 20, 60, 100])
def test_aac_that_ends_within_a_frame_has_the_frames_before(cut):
    data = audio_bytes("aac", "fltp", "adts", 44100, 44100)
    whole = probe(data, "audio", POLICY)
    info = probe(data[:-cut], "audio", POLICY)
    assert 0 < whole.num_samples - info.num_samples <= 2 * 1024
    np.testing.assert_array_equal(
        decode_audio(data[:-cut], info, 44100, info.num_samples).waveform,
        decode_audio(data, whole, 44100, info.num_samples).waveform,
    )


def test_pcm_survives_to_the_last_bit_and_channels_are_averaged():
    left, right = tone(8000, 16000), tone(8000, 16000, 880)
    data = audio_bytes("pcm_f32le", "flt", "wav", 16000, waveform=np.stack([left, right]), layout="stereo")
    info = probe(data, "audio", POLICY)
    np.testing.assert_allclose(decode_audio(data, info, 16000, 8000).waveform, (left + right) / 2, atol=1e-7)


def test_mixing_surround_sound_favours_the_centre_and_omits_low_frequencies():
    rate, size = 16000, 1600
    names = [channel.name for channel in av.AudioLayout("5.1").channels]
    for place, name in enumerate(names):
        planes = np.zeros((6, size), np.float32)
        planes[place] = tone(size, rate)
        data = audio_bytes("pcm_f32le", "flt", "wav", rate, waveform=planes, layout="5.1")
        heard = decode_audio(data, probe(data, "audio", POLICY), rate, size).waveform
        weight = {"FC": 1, "FL": 0.5**0.5, "FR": 0.5**0.5, "LFE": 0}.get(name, 0.5) / (2 + 2 * 0.5**0.5)
        np.testing.assert_allclose(heard, weight * planes[place], atol=1e-6, err_msg=name)


@pytest.mark.parametrize("channels", [9, 17, 64])
def test_of_more_channels_than_have_names_the_mean_is_heard(channels):
    samples = np.random.default_rng(channels).integers(-9000, 9000, (500, channels), np.int16)
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples.tobytes())
    data = out.getvalue()
    heard = decode_audio(data, probe(data, "audio", POLICY), 16000, 500).waveform
    np.testing.assert_allclose(heard, (samples / 32768).mean(axis=1), atol=1e-6)


def test_sound_outside_the_range_is_bounded_and_nan_becomes_silence():
    wild = np.array([np.nan, np.inf, -np.inf, 3, -3] * 400, np.float32)
    data = audio_bytes("pcm_f32le", "flt", "wav", 16000, waveform=wild)
    heard = decode_audio(data, probe(data, "audio", POLICY), 16000, 2000).waveform
    assert heard[:5].tolist() == [0, 0, 0, 1, -1]


def test_audio_is_cut_or_padded_to_the_requested_length():
    data = audio_bytes(num_samples=1000)
    info = probe(data, "audio", POLICY)
    assert decode_audio(data, info, 44100, 300).waveform.shape == (300,)
    padded = decode_audio(data, info, 44100, 1500).waveform
    assert padded.shape == (1500,)
    assert not padded[1000:].any()


@pytest.mark.parametrize(
    ("make", "modality", "policy", "words"),
    [
        (lambda: image_bytes("PNG"), "image", {"image": ImagePolicy(max_pixels=1024)}, "3072.*1024.*spec.gateway.media.image.maxPixels"),
        (lambda: png_claiming(50_000, 50_000), "image", {}, "2500000000.*spec.gateway.media.image.maxPixels"),
        (lambda: b"\xff\xd8\xff" + bytes(2000), "image", {"image": ImagePolicy(max_bytes=1024)}, "2003 bytes.*1024.*image.maxBytes"),
        (lambda: video_bytes(frames=60), "video", {"video": VideoPolicy(max_duration_seconds=1)}, "2 seconds.*video.maxDurationSeconds"),
        (lambda: video_bytes(frames=3), "video", {"image": ImagePolicy(max_pixels=1024)}, "pixels.*image.maxPixels"),
        (lambda: audio_bytes(num_samples=99999), "audio", {"audio": AudioPolicy(max_duration_seconds=1)}, "seconds.*audio.maxDurationSeconds"),
    ],
)  # fmt: skip
def test_every_limit_names_itself_the_value_and_the_field(make, modality, policy, words):
    with pytest.raises(BadMediaError, match=words):
        probe(make(), modality, MediaPolicy(**policy))


@pytest.mark.parametrize("container", ["mp4", "matroska", "webm", "mpegts"])
def test_a_videos_sound_track_is_noticed_measured_and_decoded(container):
    data = film(2, 1.5, container=container)
    assert probe(data, "video", POLICY).has_sound
    assert not probe(film(2, 0, container=container), "video", POLICY).has_sound
    sound = probe(data, "audio", POLICY, of_video=True)
    assert (sound.of_video, sound.digest) == (True, probe(data, "video", POLICY).digest)
    assert sound.num_samples == pytest.approx(1.5 * sound.sample_rate_hz, abs=3000)
    wave = decode_audio(data, sound, sound.sample_rate_hz, sound.num_samples).waveform
    assert np.abs(wave).max() > 0.2


def test_a_videos_sound_obeys_video_byte_and_sound_duration_limits():
    data = film(2, 1.5)
    few = MediaPolicy(audio=AudioPolicy(max_bytes=1024))
    with pytest.raises(BadMediaError, match=r"spec\.gateway\.media\.audio\.maxBytes"):
        probe(data, "audio", few)
    assert probe(data, "audio", few, of_video=True).num_samples
    with pytest.raises(BadMediaError, match=r"spec\.gateway\.media\.video\.maxBytes"):
        probe(data, "audio", MediaPolicy(video=VideoPolicy(max_bytes=1024)), of_video=True)
    with pytest.raises(BadMediaError, match=r"spec\.gateway\.media\.audio\.maxDurationSeconds"):
        probe(data, "audio", MediaPolicy(audio=AudioPolicy(max_duration_seconds=1)), of_video=True)


def tracks(container, codec, lengths, flagged):
    """Tracks of these numbers of frames or tenths of a second, of which one has the default flag."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        streams = [
            file.add_stream(codec, rate=10)
            if codec == "libx264"
            else file.add_stream(codec, rate=16000, layout="mono", format="fltp")
            for _ in lengths
        ]
        for number, stream in enumerate(streams):
            stream.disposition = av.stream.Disposition.default if number == flagged else 0
            if codec == "libx264":
                stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number, (stream, length) in enumerate(zip(streams, lengths, strict=True)):
            if codec == "libx264":
                frames = [av.VideoFrame.from_ndarray(frame_pixels(number)) for _ in range(length)]
            else:
                frames = [av.AudioFrame.from_ndarray(tone(1600 * length, 16000)[None], "fltp", "mono")]
                frames[0].sample_rate = 16000
            for frame in [*frames, None]:
                file.mux(stream.encode(frame))
    return out.getvalue()


@pytest.mark.parametrize("flagged", [0, 1, None])
@pytest.mark.parametrize("container", ["mp4", "matroska", "mov"])
def test_of_several_tracks_the_one_with_the_default_flag_counts(container, flagged):
    film = tracks(container, "libx264", [5, 7, 9], flagged)
    info = probe(film, "video", POLICY)
    assert info.num_frames == [5, 7, 9][flagged or 0]
    frames = decode_video(film, info, [0, info.num_frames - 1]).frames
    assert [number_of(frame) for frame in frames] == [flagged or 0] * 2
    sound = tracks(container, "aac", [5, 20, 30], flagged)
    assert probe(sound, "audio", POLICY).duration_seconds == pytest.approx([0.5, 2, 3][flagged or 0], abs=0.1)


def test_the_bytes_decide_what_a_medium_is():
    with pytest.raises(BadMediaError, match="declared as video, but the bytes are png"):
        probe(image_bytes("PNG"), "video", POLICY)
    with pytest.raises(BadMediaError, match="declared as image, but the bytes are mp4"):
        probe(video_bytes(frames=3), "image", POLICY)
    with pytest.raises(BadMediaError, match="has an unknown format"):
        probe(b"#EXTM3U\nfile:///etc/passwd\n", "video", POLICY)
    with pytest.raises(BadMediaError, match="no video stream"):
        probe(audio_bytes("aac", "fltp", "mp4"), "video", POLICY)
    with pytest.raises(BadMediaError, match="empty"):
        probe(b"", "audio", POLICY)


def _measure_and_decode(data, modality):
    info = probe(data, modality, POLICY)
    if modality == "image":
        decode_image(data, info)
    elif modality == "video":
        decode_video(data, info, list(range(info.num_frames)))
    else:
        decode_audio(data, info, 16000, 16000)


@pytest.mark.parametrize(
    ("make", "modality"),
    [
        (
            lambda: image_bytes("PNG", np.random.default_rng(1).integers(0, 255, (64, 64, 3), np.uint8)),
            "image",
        ),
        (
            lambda: image_bytes("JPEG", np.random.default_rng(1).integers(0, 255, (64, 64, 3), np.uint8)),
            "image",
        ),
        (lambda: image_bytes("BMP"), "image"),
        (lambda: video_bytes(), "video"),
        (lambda: video_bytes(mux={"movflags": "faststart"}), "video"),
        (lambda: audio_bytes(), "audio"),
        (lambda: audio_bytes("flac", "s16", "flac"), "audio"),
        (lambda: audio_bytes("aac", "fltp", "ipod"), "audio"),
    ],
    ids=["png", "jpeg", "bmp", "mp4", "mp4-index-first", "wav", "flac", "m4a"],
)
def test_half_a_file_is_refused(make, modality):
    data = make()
    with pytest.raises(BadMediaError):
        _measure_and_decode(data[: len(data) // 2], modality)


@pytest.mark.parametrize(
    ("head", "modality"),
    [(b"\x89PNG\r\n\x1a\n", "image"), (b"\xff\xd8\xff\xe0", "image"), (b"RIFF\x00\x10\x00\x00WEBP", "image"), (b"BM", "image"),
     (b"GIF89a", "image"), (b"\x00\x00\x00\x18ftypisom", "video"), (b"\x1a\x45\xdf\xa3", "video"), (b"\x47", "video"),
     (b"RIFF\x00\x10\x00\x00AVI ", "video"), (b"RIFF\x00\x10\x00\x00WAVE", "audio"), (b"OggS", "audio"), (b"fLaC", "audio"),
     (b"caff\x00\x01\x00\x00", "audio"), (b".snd\x00\x00\x00\x18", "audio"), (W64_HEAD, "audio"), (b"BW64\xff\xff\xff\xffWAVE", "audio"),
     (b"FLV\x01\x05\x00\x00\x00\x09", "video"), (b"\x00\x00\x01\xba\x44", "video"),
     (b"\xff\xfb\x90", "audio"), (b"\xff\xf1\x50", "audio"), (b"ID3\x03\x00\x00\x00\x00\x00\x05", "audio")],
)  # fmt: skip
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_bytes_behind_any_magic_are_refused_with_a_typed_error(head, modality, seed):
    data = head + np.random.default_rng(seed).bytes(4096)
    with pytest.raises(BadMediaError):
        _measure_and_decode(data, modality)


@pytest.mark.parametrize("seed", range(12))
def test_damaged_bytes_decode_or_are_refused_but_never_surprise(seed):
    rng = np.random.default_rng(seed)
    for make, modality in (
        (lambda: image_bytes("JPEG"), "image"),
        (lambda: image_bytes("PNG", orientation=6), "image"),
        (lambda: video_bytes(frames=12), "video"),
        (lambda: audio_bytes("libmp3lame", "s16p", "mp3", 44100, 8000), "audio"),
        (lambda: audio_bytes("libopus", "s16", "ogg", 48000, 8000), "audio"),
    ):
        data = bytearray(make())
        for at in rng.integers(0, len(data), 8):
            data[at] = rng.integers(0, 256)
        with contextlib.suppress(BadMediaError):
            _measure_and_decode(bytes(data), modality)


def test_an_error_keeps_nothing_of_the_decode_that_it_ended():
    held = []

    def fail():
        pixels = np.zeros(10)
        held.append(weakref.ref(pixels))
        with containers.open_av(audio_bytes(), "wav"):
            raise ValueError("the library's own words")

    gc.disable()  # what refers to itself would wait for it
    try:
        with contextlib.suppress(BadMediaError):
            fail()
        assert held[0]() is None
    finally:
        gc.enable()
