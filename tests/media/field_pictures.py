"""H.264 whose frames are pairs of fields (PAFF), as broadcasts and camcorders have it. No free encoder makes it, so it is built
from uncompressed macroblocks.
"""

import io
from fractions import Fraction

import av

SIDE = 64
GREY_STEP = 15


class _Bits:
    """A bit string with the codes of ITU-T H.264, 9.1."""

    def __init__(self):
        self.text = ""

    def u(self, bits, value):
        self.text += f"{value:0{bits}b}"
        return self

    def ue(self, value):
        self.text += "0" * ((value + 1).bit_length() - 1) + f"{value + 1:b}"
        return self

    def align(self):
        self.text += "0" * (-len(self.text) % 8)
        return self

    def unit(self, kind):
        self.u(1, 1).align()
        body, zeros = bytearray([0x60 | kind]), 0
        for byte in int(self.text, 2).to_bytes(len(self.text) // 8, "big"):
            if zeros >= 2 and byte <= 3:
                body.append(3)
                zeros = 0
            body.append(byte)
            zeros = 0 if byte else zeros + 1
        return b"\0\0\0\1" + bytes(body)


def _parameters():
    macroblocks = SIDE // 16
    sps = _Bits().u(8, 77).u(8, 0).u(8, 30).ue(0).ue(4).ue(0).ue(4).ue(1).u(1, 0)
    sps.ue(macroblocks - 1).ue(macroblocks // 2 - 1)
    sps.u(1, 0).u(1, 0).u(1, 1).u(1, 0)  # fields, no adaptive ones
    sps.u(1, 1).u(4, 0).u(1, 1).u(32, 1).u(32, 50).u(1, 1).u(4, 0)  # 50 fields a second
    pps = _Bits().ue(0).ue(0).u(1, 0).u(1, 0).ue(0).ue(0).ue(0).u(1, 0).u(2, 0).ue(0).ue(0).ue(0).u(3, 0)
    return sps.unit(7) + pps.unit(8)


def _field(is_bottom, grey):
    """A field of uncompressed macroblocks, the first of a pair as an IDR picture."""
    bits = _Bits().ue(0).ue(2).ue(0).u(8, 0).u(1, 1).u(1, is_bottom)
    if not is_bottom:
        bits.ue(0)
    bits.u(8, is_bottom).u(1 if is_bottom else 2, 0).ue(0)
    for _ in range((SIDE // 16) * (SIDE // 32)):
        bits.ue(25).align()
        bits.text += f"{grey:08b}" * 256 + f"{128:08b}" * 128
    return bits.unit(1 if is_bottom else 5)


def field_video(container, pairs=10, fields_a_packet=1):
    """A video of 25 frames a second, each brighter than the one before, with a time for each packet."""
    fields = [_field(n % 2, 40 + GREY_STEP * (n // 2) + 4 * (n % 2)) for n in range(2 * pairs)]
    fields[::2] = [_parameters() + field for field in fields[::2]]
    file = io.BytesIO()
    with (
        av.open(io.BytesIO(b"".join(fields)), format="h264") as source,
        av.open(file, "w", format=container) as out,
    ):
        stream = out.add_stream_from_template(source.streams.video[0])
        for at in range(0, len(fields), fields_a_packet):
            packet = av.Packet(b"".join(fields[at : at + fields_a_packet]))
            packet.pts = packet.dts = at
            packet.duration, packet.time_base, packet.stream = fields_a_packet, Fraction(1, 50), stream
            packet.is_keyframe = at % 2 == 0
            out.mux(packet)
    return file.getvalue()
