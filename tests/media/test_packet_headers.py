"""Headers of pictures and Vorbis packets are read whatever their bytes are."""

from hypothesis import given
from hypothesis import strategies as st

from mmd_workers.media.formats.vorbis import BlockSizes
from mmd_workers.media.pictures import is_bidirectional, may_begin, picture_order

CODECS = ["h264", "hevc", "mpeg4", "mpeg2video", "h263", "vp8"]
STARTS = st.sampled_from(
    [b"", b"\0\0\1\x67", b"\0\0\1\x68", b"\0\0\1\x65", b"\0\0\1\x41", b"\0\0\1\xb6", b"\0\0\1\0"]
)
PICTURES = st.lists(st.builds(bytes.__add__, STARTS, st.binary(max_size=40)), max_size=6).map(b"".join)


@given(st.sampled_from(CODECS), st.lists(PICTURES, min_size=1), st.builds(bytes.__add__, st.sampled_from([b"", b"\1"]), PICTURES))  # fmt: skip
def test_any_bytes_are_pictures_of_some_order(codec: str, packets: list[bytes], header: bytes) -> None:
    order = picture_order(codec, header)
    for pts, packet in enumerate(packets):
        assert order.completes(packet, pts) in (False, True)
        assert may_begin(codec, packet, header) in (False, True)
        assert is_bidirectional(codec, packet) in (False, True)


@given(
    st.builds(bytes.__add__, st.sampled_from([b"", b"\2"]), st.binary(max_size=400)), st.lists(st.binary())
)
def test_any_bytes_are_headers_of_vorbis_or_none(headers: bytes, packets: list[bytes]) -> None:
    blocks = BlockSizes(headers)
    if blocks.is_known:
        assert all(0 <= blocks.samples(packet) <= 1 << 14 for packet in packets)
