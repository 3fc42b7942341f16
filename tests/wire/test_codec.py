import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmd_api.contract.errors import WireError
from mmd_api.contract.load import PodLoad
from mmd_api.contract.pools import MODALITIES
from mmd_api.contract.sampling import LogitRules
from mmd_workers.wire import messages
from mmd_workers.wire.codec import MAX_MESSAGE_BYTES, pack, pack_frame, unpack, unpack_frame
from mmd_workers.wire.messages.every_pod import Heartbeat
from mmd_workers.wire.messages.gateway import TokenBatch, TokenItem
from mmd_workers.wire.messages.message_parts import FeatureRef, Sampling, TensorHeader, TokenLogprob
from mmd_workers.wire.messages.prefill import Cancel, EmbeddingOffer, GenerateRequest

text = st.text(max_size=20)
number = st.integers(min_value=-(2**63), max_value=2**63 - 1)
real = st.floats(allow_nan=False)
modality = st.sampled_from(MODALITIES)
ids = st.lists(number, max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | number | real | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
facts = st.dictionaries(text, plain, max_size=4)
features = st.builds(
    FeatureRef,
    feature_id=text,
    digest=text,
    modality=modality,
    num_bytes=number,
    num_tokens=number,
    ranges=st.lists(ids, max_size=3),
    geometry=facts,
    sampling=facts,
    work=number,
)
rules = st.builds(
    LogitRules,
    allowed_token_ids=ids,
    bad_words=st.lists(ids, max_size=3),
    logit_bias=st.lists(st.tuples(number, real), max_size=3),
    repetition_penalty=real,
    frequency_penalty=real,
    presence_penalty=real,
)
sampling = st.builds(
    Sampling,
    max_tokens=number,
    temperature=real,
    top_p=real,
    top_k=number,
    seed=number,
    logprobs=st.none() | number,
    ignore_eos=st.booleans(),
    min_p=real,
    min_tokens=number,
    stop_token_ids=ids,
    rules=st.none() | rules,
)
requests = st.builds(
    GenerateRequest,
    request_id=text,
    attempt=number,
    gateway=text,
    token_ids=ids,
    features=st.lists(features, max_size=3),
    sampling=sampling,
    decode_pods=st.lists(text, max_size=3),
    deadline=real,
    arrived=real,
    output_token_ids=ids,
    trace=st.dictionaries(text, text, max_size=3),
)
items = st.builds(
    TokenItem,
    request_id=text,
    attempt=number,
    index=number,
    token_id=number,
    finish_reason=st.none() | st.sampled_from(["stop", "length", "cancelled"]),
    logprob=st.none() | real,
    top_logprobs=st.lists(st.builds(TokenLogprob, token_id=number, logprob=real), max_size=3),
)
heartbeats = st.builds(
    Heartbeat,
    pod=text,
    pool=text,
    roles=st.lists(st.sampled_from(["encode", "prefill", "decode"]), max_size=3),
    incarnation=text,
    revision=text,
    state=st.sampled_from(["loading", "ready", "draining", "drained"]),
    http_endpoint=text,
    sent=real,
    load=st.builds(PodLoad, encode_queued_work=st.dictionaries(modality, number), itl_seconds=real),
)


@given(
    st.one_of(
        requests, heartbeats, st.builds(TokenBatch, pod=text, step=number, items=st.lists(items, max_size=3))
    )
)
def test_a_message_arrives_as_it_was_sent(message):
    assert unpack(type(message), pack(message)) == message


@given(features, st.binary(max_size=2000))
def test_a_frame_arrives_with_its_bytes(header, payload):
    got, view = unpack_frame(FeatureRef, pack_frame(header, payload))
    assert got == header
    assert bytes(view) == payload


@given(st.binary(max_size=300))
def test_noise_is_refused_with_a_typed_error(noise):
    for kind in (TokenBatch, GenerateRequest, Cancel):
        with pytest.raises(WireError):
            unpack(kind, noise)


def test_fields_of_newer_peers_are_ignored():
    data = msgpack.packb({"request_id": "a", "attempt": 1, "priority": "new"})
    assert unpack(Cancel, data) == Cancel("a", 1)


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"request_id": "a"}, "attempt"),
        ({"request_id": "a", "attempt": "1"}, "attempt"),
        ({"request_id": "a", "attempt": True}, "attempt"),
        ({"request_id": "a", "attempt": 1.0}, "attempt"),
        ({"request_id": 7, "attempt": 1}, "request_id"),
        ({"request_id": b"a", "attempt": 1}, "request_id"),
        ([1, 2], "map"),
    ],
)
def test_wrong_types_are_refused_and_named(body, where):
    with pytest.raises(WireError, match=where):
        unpack(Cancel, msgpack.packb(body))


def test_wrong_types_are_refused_deep_inside():
    offer = {"transfer_id": "t", "feature_id": "f", "sender": "s", "total_bytes": 4, "digest": "d"}
    tensor = {"name": "x", "dtype": "float32", "shape": [1, "2"], "num_bytes": 4}
    with pytest.raises(WireError, match=r"tensors\.0\.shape\.1"):
        unpack(EmbeddingOffer, msgpack.packb(offer | {"tensors": [tensor]}))


def test_nesting_is_bounded():
    deep: object = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(WireError, match="nested deeper"):
        unpack(Cancel, msgpack.packb({"request_id": "a", "attempt": 1, "later": deep}))
    with pytest.raises(WireError):
        unpack(Cancel, b"\x91" * 5000 + b"\x01")


def test_size_is_bounded_both_ways():
    with pytest.raises(WireError, match="split it"):
        pack(Cancel("a" * MAX_MESSAGE_BYTES, 1))
    with pytest.raises(WireError, match="limit"):
        unpack(Cancel, b"\xc1" * (MAX_MESSAGE_BYTES + 1))
    with pytest.raises(WireError, match="smaller chunks"):
        pack_frame(Cancel("a", 1), b"x" * MAX_MESSAGE_BYTES)


def test_a_frame_that_lies_about_its_header_is_refused():
    with pytest.raises(WireError, match="exceeds the frame"):
        unpack_frame(Cancel, struct.pack("<I", 99) + b"abc")
    with pytest.raises(WireError, match="no room"):
        unpack_frame(Cancel, b"ab")


def test_the_payload_of_a_frame_is_not_copied_on_arrival():
    data = pack_frame(TensorHeader("a", "float32", [1], 4), b"\0" * 4)
    _, view = unpack_frame(TensorHeader, data)
    assert view.obj is data


def test_every_message_has_a_validator():
    assert len(messages.MESSAGES) > 25
    for kind in messages.MESSAGES:
        with pytest.raises(WireError):
            unpack(kind, b"\x01")
