"""The plan of pieces: both sides derive the same one, every byte travels once, and views are not copied."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_api.contract.errors import LinkError
from mmd_workers.kv import chunks
from mmd_workers.kv.link import PIECE_BYTES

torch.set_num_threads(1)
CPU = torch.device("cpu")


class Wire:
    """A link to oneself: what was sent under a tag is received under it."""

    epoch = 0

    def __init__(self) -> None:
        self.sent: dict[int, torch.Tensor] = {}

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        assert tensor.is_contiguous()
        assert 0 < tensor.nbytes <= PIECE_BYTES
        assert tag not in self.sent
        self.sent[tag] = tensor.clone()

    def recv(self, tensor: torch.Tensor, tag: int) -> None:
        tensor.copy_(self.sent.pop(tag))

    def close(self) -> None: ...


def layout(heads, dims, dtype="bfloat16"):
    return SimpleNamespace(num_layers=len(heads), num_kv_heads=heads, head_dim=dims, dtype=dtype)


layers = st.lists(st.tuples(st.integers(1, 16), st.sampled_from([32, 80, 128, 256])), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(
    layers,
    st.integers(1, 900),
    st.sampled_from(["bfloat16", "float32", "float16", "float8_e4m3fn"]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_any_layout_and_dtype_is_received_bit_for_bit(shape, num_tokens, dtype, scattered, first):
    geometry = layout([h for h, _ in shape], [d for _, d in shape], dtype)
    tensors = chunks.empty_range(geometry, num_tokens, CPU)
    for tensor in tensors:
        tensor.view(torch.uint8).random_(0, 255)
    if scattered:
        tensors = [tensor.clone() for tensor in tensors]
    wire = Wire()
    after = chunks.send_range(wire, tensors, first)
    assert sorted(wire.sent) == list(range(first, after))
    assert after - first == chunks.num_pieces(geometry, num_tokens)
    assert all(piece.nbytes == PIECE_BYTES for tag, piece in wire.sent.items() if tag < after - 1)
    got = chunks.recv_range(wire, geometry, num_tokens, first, CPU)
    assert not wire.sent
    for sent, arrived, (heads, dim) in zip(tensors, got, shape, strict=True):
        assert arrived.shape == (2, num_tokens, heads, dim)
        assert arrived.dtype == getattr(torch, dtype)
        assert torch.equal(sent.view(torch.uint8), arrived.view(torch.uint8))


def test_layers_of_a_received_range_are_views_of_one_buffer():
    geometry = layout([8] * 6, [128] * 6)
    wire = Wire()
    chunks.send_range(wire, chunks.empty_range(geometry, 700, CPU), 0)
    assert len(wire.sent) > 2
    got = chunks.recv_range(wire, geometry, 700, 0, CPU)
    assert len({tensor.untyped_storage().data_ptr() for tensor in got}) == 1


def test_small_layers_share_a_piece():
    assert chunks.num_pieces(layout([8] * 32, [128] * 32), 16) == 1


def test_no_tokens_take_no_piece():
    geometry = layout([8], [128])
    assert chunks.num_pieces(geometry, 0) == 0
    assert chunks.send_range(Wire(), chunks.empty_range(geometry, 0, CPU), 5) == 5


def test_a_tensor_that_is_not_contiguous_is_refused_with_the_remedy():
    with pytest.raises(LinkError, match="contiguous"):
        chunks.send_range(Wire(), [torch.zeros(2, 4, 8, 16).transpose(1, 2)], 0)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(LinkError, match="pipeline revision"):
        chunks.empty_range(layout([1], [8], "load"), 1, CPU)
