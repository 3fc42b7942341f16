"""KV in 8 and 4 bits: every value comes back within the error of its format, and what is not a number stays so."""

import itertools
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_workers.kv.chunks import bytes_of, num_pieces, split
from mmd_workers.kv.quantize import KvWire
from mmd_workers.model.prompt import KvLayout

torch.set_num_threads(1)
FORMATS = ("Fp8", "Int8", "Int4")
DTYPES = ("float32", "bfloat16", "float16")
UP = 1 + 2**-7  # a scale is rounded up to a bfloat16


def kv(layout: KvLayout, tokens: int, seed: int = 0, magnitude: float = 1.0) -> list[torch.Tensor]:
    """Random KV [2, tokens, kv_heads, head_dim] of each layer, each head of another magnitude and with a bias."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for heads, dim in zip(layout.num_kv_heads, layout.head_dim, strict=True):
        values = torch.randn(2, tokens, heads, dim, generator=generator)
        biases = 3 * torch.randn(2, 1, heads, 1, generator=generator)
        sizes = magnitude * torch.rand(2, tokens, heads, 1, generator=generator)
        found.append(((values + biases) * sizes).to(getattr(torch, layout.dtype)))
    return found


def moved(wire: KvWire, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return wire.unpack(wire.pack(tensors))


def bound(wire_format: str, values: torch.Tensor) -> torch.Tensor:
    """The most by which a value may differ, in float64, by its own size and the others of its row, before it is rounded to its type."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    reach = values.abs().amax(-1, keepdim=True)
    if wire_format == "Fp8":
        return torch.maximum(values.abs() / 16, reach * UP / 448 / 2**9).expand_as(values)
    if wire_format == "Int8":
        return (reach * UP / 127 / 2).expand_as(values)
    middle = (low + high).abs() / 2
    return (((high - low) / 2 + middle / 2**8) * UP / 15).expand_as(values)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from(DTYPES),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 70)), min_size=1, max_size=4),
    st.integers(0, 40),
    st.floats(-10, 3).map(lambda exponent: 10**exponent),
    st.integers(0, 1000),
)
def test_each_value_comes_back_within_the_error_of_its_format(
    wire_format, dtype, shape, tokens, magnitude, seed
):
    layout = KvLayout(len(shape), [h for h, _ in shape], [d for _, d in shape], dtype)
    tensors = kv(layout, tokens, seed, magnitude)
    wire = KvWire(layout, wire_format)
    packed = wire.pack(tensors)
    assert sum(part.nbytes for part in packed) == tokens * wire.bytes_per_token
    assert len(list(split(packed))) == num_pieces(wire.layout, tokens)
    info = torch.finfo(getattr(torch, dtype))
    for before, after in zip(tensors, wire.unpack(packed), strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        exact, found = before.double(), after.double()
        if tokens:
            rounded = info.eps * exact.abs() + info.tiny  # to the type, and by arithmetic in float32
            assert (
                (found - exact).abs() <= bound(wire_format, exact) * (1 + info.eps + 1e-5) + rounded
            ).all()


@pytest.mark.parametrize(("wire_format", "row"), [("Fp8", 65 + 2), ("Int8", 65 + 2), ("Int4", 33 + 4)])
def test_a_row_has_its_codes_and_its_scale(wire_format, row):
    wire = KvWire(KvLayout(2, [2, 4], [65, 65], "bfloat16"), wire_format)
    assert wire.bytes_per_token == 2 * (2 + 4) * row


@pytest.mark.parametrize("wire_format", FORMATS)
def test_a_head_of_zeros_stays_zero_and_heads_are_independent(wire_format):
    layout = KvLayout(1, [3], [7], "float32")
    tensor = torch.zeros(2, 2, 3, 7)
    tensor[:, 0, 1] = 1e30
    (found,) = moved(KvWire(layout, wire_format), [tensor])
    assert found[:, 0, 1].sub(1e30).abs().max() <= 1e28
    found[:, 0, 1] = 0
    assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire_format", FORMATS)
def test_the_largest_values_stay_finite_and_the_least_stay_small(wire_format, dtype):
    layout, info = KvLayout(1, [1], [8], dtype), torch.finfo(getattr(torch, dtype))
    signs = torch.tensor([1, -1] * 4, dtype=getattr(torch, dtype))
    for value, other in itertools.product([info.max, info.tiny, info.smallest_normal / 2], [1, 0.5, 0]):
        tensor = value * signs.repeat(2, 1, 1, 1)
        tensor[..., 0] *= other
        (found,) = moved(KvWire(layout, wire_format), [tensor])
        assert found.isfinite().all()
        assert (found.double() - tensor.double()).abs().max() <= 0.08 * value + 2 * info.smallest_normal


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("wire_format", FORMATS)
def test_only_a_head_with_a_nonfinite_value_arrives_as_nan(wire_format, value):
    layout = KvLayout(1, [2], [6], "float32")
    (tensor,) = kv(layout, 3)
    (whole,) = moved(KvWire(layout, wire_format), [tensor])
    tensor[1, 2, 0, 5] = value
    (found,) = moved(KvWire(layout, wire_format), [tensor])
    assert found[1, 2, 0].isnan().all()
    found[1, 2, 0] = whole[1, 2, 0]
    assert torch.equal(found, whole)


def test_the_default_moves_the_tensors_themselves_and_offers_what_it_always_did():
    layout = KvLayout(2, [2, 2], [16, 16], "bfloat16")
    wire, tensors = KvWire(layout), kv(layout, 3)
    assert all(a is b for a, b in zip(moved(wire, tensors), tensors, strict=True))
    assert wire.layout is layout
    assert wire.bytes_per_token == layout.bytes_per_token()
    assert {**wire.terms, "packed": "Model"} == asdict(layout)


@pytest.mark.parametrize("kv_dtype", ["Int8", "Fp8"])
def test_rows_that_a_pool_has_packed_travel_as_they_are(kv_dtype):
    layout = KvLayout(2, [2, 1], [16, 15], "bfloat16")
    pool, exact = layout.packed_as(kv_dtype), kv(layout, 3)
    rows = KvWire(layout, kv_dtype).pack(exact)
    for wire in (KvWire(pool), KvWire(pool, kv_dtype)):
        assert all(a is b for a, b in zip(wire.pack(rows), rows, strict=True))
        assert all(a is b for a, b in zip(wire.unpack(rows), rows, strict=True))
        assert wire.layout is pool
        assert wire.bytes_per_token == KvWire(layout, kv_dtype).bytes_per_token == pool.bytes_per_token()
    assert KvWire(pool).terms["packed"] == kv_dtype


def test_each_format_is_offered_under_its_name():
    layout = KvLayout(1, [2], [16], "float32")
    terms = [KvWire(layout, name).terms for name in ("Model", *FORMATS)]
    assert all(a != b for a, b in itertools.combinations(terms, 2))


@pytest.mark.parametrize("wire_format", FORMATS)
def test_packed_layers_are_neighbours_so_that_no_piece_is_copied(wire_format):
    layout = KvLayout(2, [2, 2], [15, 16], "float32")
    first, second = KvWire(layout, wire_format).pack(kv(layout, 4))
    assert bytes_of(second).data_ptr() == first.data_ptr() + first.nbytes


def test_fewer_bits_cost_more_error():
    layout = KvLayout(1, [8], [64], "float32")
    (tensor,) = kv(layout, 64)
    errors = [(moved(KvWire(layout, name), [tensor])[0] - tensor).norm() for name in ("Int8", "Fp8", "Int4")]
    assert errors == sorted(errors)
