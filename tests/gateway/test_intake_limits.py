"""What fits a model's context, how much may follow it, and what a refused request says: text alone, with the real tokenizer."""

from __future__ import annotations

import copy

import pytest

from mmd_api.contract import errors
from mmd_api.contract.sampling import LogitRules
from mmd_workers.gateway.api_errors import RETRY_AFTER_SECONDS, ApiError, api_error, refused
from mmd_workers.gateway.chat_request import ChatRequest
from mmd_workers.gateway.conversation import conversation
from mmd_workers.gateway.hold import MediaHold
from mmd_workers.gateway.intake import MAX_SEED, Intake, Prepared
from mmd_workers.gateway.timeline import Timeline
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.observe.metrics import Metrics

from .running import pipeline_config


def asked(text: str = "what is red", **more) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": text}], **more})


def media(*kinds: str) -> ChatRequest:
    parts = [{"type": f"{kind}_url", f"{kind}_url": {"url": "data:,"}} for kind in kinds]
    return asked(messages=[{"role": "user", "content": parts}])


@pytest.fixture
def intake(frontend):
    """Of a gateway that takes two media a request."""
    config = pipeline_config("limits", {"media": {"maxItemsPerRequest": 2}})
    return Intake(config, frontend, DecodePool(1, 10), Metrics(["gateway"]))


async def prepare(intake: Intake, request: ChatRequest, model_len: int = 0) -> Prepared:
    return await intake.prepare(request, MediaHold(100).reservation(), Timeline("r", 0.0), model_len)


async def refusal(intake: Intake, request: ChatRequest, model_len: int = 0) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await prepare(intake, request, model_len)
    return caught.value


def tokens_of(frontend, request: ChatRequest) -> int:
    return len(frontend.layout(conversation(request.messages)[0], []).token_ids)


async def test_a_prompt_leaves_room_for_what_the_pods_can_still_hold(intake, frontend):
    prompt = tokens_of(frontend, asked())
    for room in (1, 5):
        prepared = await prepare(intake, asked(), prompt + room)
        assert len(prepared.layout.token_ids) == prompt
        assert prepared.sampling.max_tokens == room
    whole = (await prepare(intake, asked())).sampling.max_tokens
    assert whole == frontend.max_model_len - prompt
    beyond = (await prepare(intake, asked(), frontend.max_model_len + 9)).sampling.max_tokens
    assert beyond == whole


async def test_the_memory_of_a_text_is_given_back_once_it_is_a_list_of_tokens(intake):
    hold = MediaHold(100)
    share = hold.reservation()
    await share.grow(60)
    await intake.prepare(asked(), share, Timeline("r", 0.0), 0)
    assert (share.num_bytes, hold.used_bytes) == (0, 0)


async def test_the_spec_may_shorten_the_context(frontend):
    prompt = tokens_of(frontend, asked())
    config = pipeline_config("short", {}, {"maxModelLen": prompt + 3})
    short = Intake(config, frontend, DecodePool(1, 10), Metrics(["gateway"]))
    assert (await prepare(short, asked())).sampling.max_tokens == 3


@pytest.mark.parametrize("missing", [0, 3])
async def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(intake, frontend, missing):
    prompt = tokens_of(frontend, asked())
    error = await refusal(intake, asked(), prompt - missing)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert f"{prompt} tokens, but at most {prompt - missing - 1} fit: {missing + 1} too many" in error.message
    assert f"the largest part is the text with {prompt} tokens" in error.message


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(intake, frontend):
    longest = frontend.longest_token_characters
    error = await refusal(intake, asked("x" * (4 * longest + 1)), 5)
    assert f"the text has {4 * longest + 1} characters: at least 5 tokens, but at most 4 fit" in error.message
    fits = await refusal(intake, asked("x" * (4 * longest)), 5)  # it may: only tokenizing can tell
    assert "the prompt has" in fits.message


@pytest.mark.parametrize(
    ("more", "most"),
    [({}, 50), ({"max_tokens": 7}, 7), ({"max_completion_tokens": 8, "max_tokens": 7}, 8), ({"max_tokens": 51}, 50)],
)  # fmt: skip
async def test_a_request_gets_what_it_asks_for_and_never_more_than_the_room(intake, frontend, more, most):
    prompt = tokens_of(frontend, asked())
    assert (await prepare(intake, asked(**more), prompt + 50)).sampling.max_tokens == most


async def test_the_third_of_three_media_is_one_too_many(intake):
    error = await refusal(intake, media("image", "image", "image"))
    assert (error.status, error.code) == (400, "too_many_media")
    assert error.param == "messages[0].content[2].image_url.url"
    assert "has 3 media items, more than the limit of 2" in error.message


@pytest.mark.parametrize(("takes", "words"), [({"image", "audio"}, "audio, image"), (set(), "text only")])
async def test_a_medium_that_the_model_does_not_take_is_refused_with_what_it_takes(frontend, takes, words):
    config = pipeline_config("text", {})
    narrow = copy.copy(frontend)
    narrow.modalities = frozenset(takes)
    error = await refusal(Intake(config, narrow, DecodePool(1, 10), Metrics(["gateway"])), media("video"))
    assert (error.status, error.code, error.param) == (
        400,
        "unsupported_input",
        "messages[0].content[0].video_url.url",
    )
    assert f"does not accept video (accepted: {words})" in error.message


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs": None, "ignore_eos": False}),
        ({"temperature": 0, "top_p": 0.5, "top_k": 3}, {"temperature": 0, "top_p": 0.5, "top_k": 3}),
        ({"top_k": -1, "ignore_eos": True}, {"top_k": 0, "ignore_eos": True}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"seed": 5}, {"seed": 5}),
        ({"seed": -1}, {"seed": MAX_SEED - 1}),
        ({}, {"min_p": 0.0, "min_tokens": 0, "stop_token_ids": [], "rules": None}),
        (
            {"min_p": 0.2, "min_tokens": 3, "stop_token_ids": [9, 7, 9]},
            {"min_p": 0.2, "min_tokens": 3, "stop_token_ids": [7, 9]},
        ),
        (
            {"frequency_penalty": 1, "repetition_penalty": 1.5},
            {"rules": LogitRules(frequency_penalty=1.0, repetition_penalty=1.5)},
        ),
        ({"presence_penalty": -1}, {"rules": LogitRules(presence_penalty=-1.0)}),
        ({"logit_bias": {"9": -100, "7": 2}}, {"rules": LogitRules(logit_bias=[(7, 2.0), (9, -100.0)])}),
        ({"allowed_token_ids": [9, 7, 9]}, {"rules": LogitRules(allowed_token_ids=[7, 9])}),
        (
            {"bad_words": ["red", " red", "red circle"]},
            {"rules": LogitRules(bad_words=[[346], [352], [346, 314], [352, 314]])},
        ),
        (
            {"repetition_penalty": 1, "presence_penalty": 0, "logit_bias": {}, "bad_words": []},
            {"rules": None},
        ),
    ],
)
async def test_sampling_is_as_the_client_asks(intake, more, shown):
    sampling = (await prepare(intake, asked(**more))).sampling
    assert {name: getattr(sampling, name) for name in shown} == shown
    assert 0 <= sampling.seed < MAX_SEED


async def test_no_more_tokens_are_required_than_there_is_room_for(intake, frontend):
    prompt = tokens_of(frontend, asked())
    prepared = await prepare(intake, asked(min_tokens=50), prompt + 6)
    assert (prepared.sampling.min_tokens, prepared.sampling.max_tokens) == (6, 6)


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (errors.BadMediaError("x"), 400, None),
        (errors.UnsupportedInputError("x"), 400, None),
        (errors.UnprocessableMediumError("x"), 422, None),
        (errors.OverloadedError("x"), 503, RETRY_AFTER_SECONDS),
        (errors.OverloadedError("x", retry_after_seconds=9.0), 503, 9.0),
        (errors.PeerLostError("x"), 503, RETRY_AFTER_SECONDS),
        (errors.LinkError("x"), 503, RETRY_AFTER_SECONDS),
        (errors.DeadlineError("x"), 504, None),
        (errors.MmdError("x"), 500, None),
    ],
)
def test_an_error_has_the_status_that_clients_know_and_a_retry_after(error, status, retry):
    shown = api_error(error)
    assert (shown.status, shown.code, shown.retry_after_seconds) == (status, error.code, retry)


def test_a_fault_in_the_input_names_its_part_once():
    part = "messages[0].content[1].image_url.url"
    named = refused(errors.BadMediaError("not a PNG"), part)
    assert (named.status, named.param, named.message) == (400, part, f"{part}: not a PNG")
    assert refused(errors.BadMediaError(f"{part} is not a PNG"), part).message == f"{part} is not a PNG"
    assert refused(errors.OverloadedError("full"), part).message == "full"


@pytest.mark.parametrize("row", errors.ERRORS.values(), ids=errors.ERRORS)
def test_exactly_the_errors_that_blame_the_input_name_its_part(row):
    named = refused(row("why"), "messages")
    assert named.status == (500 if row.status is None else row.status)
    assert named.param == ("messages" if row.status == 400 else None)
