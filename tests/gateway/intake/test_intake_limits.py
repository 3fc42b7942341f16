"""What fits a model's context, how much may follow it, and what a refused request says: text alone, with the real tokenizer."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Callable, Sequence

import pytest

from mmd_api.contract import errors
from mmd_api.contract.sampling import Guidance, LogitRules
from mmd_workers.gateway.basics.api_errors import RETRY_AFTER_SECONDS, ApiError, api_error, refused
from mmd_workers.gateway.basics.media_hold import MediaHold
from mmd_workers.gateway.content.chat_request import ChatRequest
from mmd_workers.gateway.content.completion_request import parse_completion_request
from mmd_workers.gateway.content.conversation import conversation
from mmd_workers.gateway.intake.checks import MAX_TEXT_TOKENS
from mmd_workers.gateway.intake.fitting import PROPORTIONAL_STEPS, Fit, with_fewer_frames
from mmd_workers.gateway.intake.intake import Intake
from mmd_workers.gateway.intake.prepared import Prepared
from mmd_workers.gateway.intake.sampling import MAX_SEED
from mmd_workers.gateway.intake.text_threads import ENCODING_BYTES, LONG_TEXT_CHARACTERS
from mmd_workers.gateway.placement.timeline import Timeline
from mmd_workers.media.choice import NO_CHOICE, SamplingChoice
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.frontend import load_frontend
from mmd_workers.model.prompt import MediumLayout, PromptLayout, SamplingPlan
from mmd_workers.observe.metrics import Metrics
from support.oracles.tokens import with_template
from tests.gateway.running import pipeline_config


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


async def test_a_texts_memory_is_freed_once_it_is_tokenized(intake):
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
    fits = prompt - missing - 1
    assert error.message.startswith(f"prompt is too long: {prompt} tokens > {fits} maximum. ")
    assert f"This model's maximum context length is {fits + 1} tokens; " in error.message
    assert f"the largest part is the text with {prompt} tokens" in error.message


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(intake, frontend):
    longest = frontend.longest_token_characters
    error = await refusal(intake, asked("x" * (4 * longest + 1)), 5)
    assert error.message.startswith("prompt is too long: at least 5 tokens > 4 maximum. ")
    assert f"the text has {4 * longest + 1} characters" in error.message
    fits = await refusal(intake, asked("x" * (4 * longest)), 5)  # it may: only tokenizing can tell
    assert "the largest part is" in fits.message


@pytest.fixture
def wide(frontend):
    """Takes 128 spaces as one token, as some vocabularies do."""
    found = copy.copy(frontend)
    found.longest_token_characters = 128
    return Intake(pipeline_config("wide", {}), found, DecodePool(1, 10), Metrics(["gateway"]))


def completion(prompt, **more):
    return parse_completion_request({"model": "m", "prompt": prompt, **more})


async def test_sixteen_characters_per_token_suffice_whatever_the_longest_token(wide):
    share = MediaHold(100).reservation()
    for work, most, remedy in (
        (wide.token_ids_of_text("x" * (16 * MAX_TEXT_TOKENS + 1), True, share, 0), MAX_TEXT_TOKENS, "maximum; the text has 2097153 characters; send less text at once"),
        (wide.prepare_texts(completion("x" * (16 * 99 + 1)), share, Timeline("r", 0.0), 100), 99, "raise spec.model.maxModelLen"),
        (prepare(wide, asked("x" * (16 * 99 + 1)), 100), 99, "maximum context length is 100 tokens; the text has 1585 characters; shorten it, or raise spec.model.maxModelLen"),
    ):  # fmt: skip
        with pytest.raises(ApiError) as caught:
            await work
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        about = f"about {(16 * most + 1) // 4} tokens > {most} maximum"
        assert caught.value.message.startswith(f"prompt is too long: {about}")
        assert caught.value.message.endswith(remedy)
    with pytest.raises(ApiError, match="the largest part is"):  # only tokenizing can tell
        await prepare(wide, asked("x" * 16 * 99), 100)


def reasoned(*characters: int) -> ChatRequest:
    """Answers with so much reasoning each, which this template leaves out."""
    answers = [
        {"role": "assistant", "content": "red", "reasoning_content": "<" * number} for number in characters
    ]
    return asked(messages=[{"role": "user", "content": "what"}, *answers])


async def test_returned_reasoning_may_exceed_the_context_within_its_own_limit(intake, frontend):
    most = 16 * MAX_TEXT_TOKENS
    fits = await prepare(intake, reasoned(most - 5, 5))
    assert fits.layout.token_ids == (await prepare(intake, reasoned(1, 1))).layout.token_ids
    error = await refusal(intake, reasoned(most, 1))
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert error.message.startswith(
        f"prompt is too long: about {most // 4} tokens > {frontend.max_model_len - 1} maximum. This model's maximum context length is "
        f"{frontend.max_model_len} tokens; the reasoning of all messages has {most + 1} characters, more than the limit of {most}; leave out that of earlier"
    )
    words = rf"^prompt is too long: about {most // 4} tokens > {MAX_TEXT_TOKENS} maximum; the reasoning of all messages"
    with pytest.raises(ApiError, match=words):
        await intake.token_ids(
            reasoned(most, 1).messages, MediaHold(100).reservation(), Timeline("r", 0.0), 0
        )


def with_tool(text: str, description: str) -> ChatRequest:
    function = {"name": "f", "description": description}
    return asked(text, tools=[{"type": "function", "function": function}])


async def test_a_prompt_that_is_too_long_by_its_tools_names_them(intake, frontend):
    longest = frontend.longest_token_characters
    for number, words in (
        (1000, "the text, most of it that of tools, with"),
        (longest * 1000, "the text has"),
    ):
        for text, description, param in (
            ("red", "red " * number, "tools"),
            ("red " * number, "Adds.", "messages"),
        ):
            request, share = with_tool(text, description), MediaHold(1 << 30).reservation()
            with pytest.raises(ApiError) as caught:
                await intake.prepare(request, share, Timeline("r", 0.0), 900)
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
            assert (words in caught.value.message) == (param == "tools" or words == "the text has")


async def test_prompts_that_are_too_much_together_are_to_be_fewer(intake, frontend):
    each = "x" * (frontend.longest_token_characters * 4000)
    with pytest.raises(ApiError) as caught:
        await intake.prepare_texts(
            completion([each] * 40), MediaHold(100).reservation(), Timeline("r", 0.0), 0
        )
    assert caught.value.param == "prompt"
    assert caught.value.message.startswith("prompt is too long: at least 160000 tokens > 131072 maximum; ")
    assert caught.value.message.endswith("; send less text at once")


class Held:
    """A frontend whose long texts wait until they may go on, each with its share of a hold as it is then."""

    def __init__(self, frontend, monkeypatch):
        self.go, self.reached, self.running, self.most = threading.Event(), threading.Event(), 0, 0
        call = type(frontend.tokenizer).__call__

        def held(tokenizer, text, *args, **more):
            if len(text) <= LONG_TEXT_CHARACTERS:
                return call(tokenizer, text, *args, **more)
            self.running += 1
            self.most = max(self.most, self.running)
            self.reached.set()
            assert self.go.wait(20)
            found = call(tokenizer, text, *args, **more)
            self.running -= 1
            return found

        monkeypatch.setattr(type(frontend.tokenizer), "__call__", held)


@pytest.fixture
def held(frontend, monkeypatch):
    waiting = Held(frontend, monkeypatch)
    yield waiting
    waiting.go.set()


WORDS = LONG_TEXT_CHARACTERS // 4 + 100
LONG = "red " * WORDS


@pytest.mark.parametrize("path", ["tokenize", "completion", "chat"])
async def test_a_short_text_is_encoded_while_a_long_one_is(intake, frontend, held, path):
    hold = MediaHold(1 << 30)
    share = hold.reservation()
    works = {
        "tokenize": lambda: intake.token_ids_of_text(LONG, True, share, 0),
        "completion": lambda: intake.prepare_texts(completion(LONG), share, Timeline("r", 0.0), 0),
        "chat": lambda: intake.token_ids(asked(LONG).messages, share, Timeline("r", 0.0), 0),
    }
    long = asyncio.create_task(works[path]())
    assert await asyncio.to_thread(held.reached.wait, 20)
    assert hold.used_bytes >= ENCODING_BYTES * len(LONG)
    async with asyncio.timeout(20):
        for text in ("red", "<|im_end|>"):
            assert len((await prepare(intake, asked(text))).layout.token_ids) == tokens_of(
                frontend, asked(text)
            )
            assert (await intake.token_ids_of_text("red", True, MediaHold(100).reservation(), 0)) == [346]
    assert not long.done()
    held.go.set()
    await asyncio.gather(long, return_exceptions=True)  # a completion's is longer than the context
    assert hold.used_bytes == 0


async def test_long_texts_are_encoded_singly_within_the_shared_budget(intake, held):
    hold = MediaHold(10 << 20)
    shares = [hold.reservation() for _ in range(3)]
    for share in shares:
        await share.grow(1 << 20)
    tasks = [asyncio.create_task(intake.token_ids_of_text(LONG, True, share, 0)) for share in shares]
    assert await asyncio.to_thread(held.reached.wait, 20)
    assert hold.used_bytes == (3 << 20) + (9 << 20) // 2
    tasks[0].cancel()  # its client has gone; its thread goes on
    while hold.used_bytes == 0 or not tasks[0].done():
        await asyncio.sleep(0)
    held.go.set()
    async with asyncio.timeout(20):
        assert [len(await task) for task in tasks[1:]] == [WORDS + 1] * 2
    assert (held.most, hold.used_bytes) == (1, 3 << 20)


INDENTED = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
INDENTED += "<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endfor %}"
INDENTED += "{% for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}"


def nested(values):
    """Tools with so many values at a depth at which a line of a template that indents has 100 spaces and more."""
    tools = []
    for first in range(0, values, 15_000):
        schema = [1] * min(15_000, values - first)
        for _ in range(20):
            schema = [schema]
        parameters = {"type": "object", "default": {"x": schema}}
        tools.append({"type": "function", "function": {"name": f"f{first}", "parameters": parameters}})
    return asked(tools=tools).tool_use


@pytest.mark.parametrize(
    ("values", "rendered", "words"),
    [(100, True, None), (25_000, True, "the text has"), (90_000, False, "when indented")],
)  # fmt: skip
async def test_tools_that_grow_when_rendered_are_refused_before_encoding(
    text_model, tmp_path, monkeypatch, values, rendered, words
):
    folder = with_template(text_model, tmp_path / "model", INDENTED)
    config = pipeline_config("limits", {}, {"id": str(folder)})
    frontend = load_frontend(config.spec.model, config.spec.gateway.media)
    intake = Intake(config, frontend, DecodePool(1, 10), Metrics(["gateway"]))
    assert frontend.renders_tools
    assert frontend.call_spelling is not None
    rendering, encoded = [], []
    render, encode = frontend._template.render, frontend._encode
    monkeypatch.setattr(frontend._template, "render", lambda *args: rendering.append(1) or render(*args))
    monkeypatch.setattr(
        frontend, "_encode", lambda text, *args, **more: encoded.append(text) or encode(text, *args, **more)
    )
    asking = intake.token_ids(
        asked().messages, MediaHold(1 << 30).reservation(), Timeline("r", 0.0), 0, nested(values)
    )
    if words is None:
        assert len(await asking) > 1000
        assert encoded[0].count("    1") == values
    else:
        with pytest.raises(ApiError, match=f"^prompt is too long: .* maximum; .*{words}") as refused:
            await asking
        assert (refused.value.param, encoded) == ("tools", [])
    assert bool(rendering) == rendered


async def test_a_rendered_text_is_reserved_by_its_own_length(text_model, tmp_path, monkeypatch):
    folder = with_template(text_model, tmp_path / "model", INDENTED)
    config = pipeline_config("limits", {}, {"id": str(folder)})
    frontend = load_frontend(config.spec.model, config.spec.gateway.media)
    intake = Intake(config, frontend, DecodePool(1, 10), Metrics(["gateway"]))
    hold = MediaHold(1 << 30)
    held, encode = [], frontend._encode

    def encoding(text, *args, **more):
        held.append((len(text), hold.used_bytes))
        return encode(text, *args, **more)

    monkeypatch.setattr(frontend, "_encode", encoding)
    await intake.token_ids(asked().messages, hold.reservation(), Timeline("r", 0.0), 0, nested(1000))
    ((characters, num_bytes),) = held
    assert characters > 1000 * 100
    assert num_bytes >= characters * ENCODING_BYTES


def test_texts_are_encoded_alike_by_many_threads_at_once(frontend):
    texts = ["red", "what is <|im_end|> red", "<|im_start|>" * 3, "Grüße, 世界 " * 50]
    messages = [conversation(asked(text).messages)[0] for text in texts]
    alone = [frontend.layout(one, []).token_ids for one in messages]
    plain = [frontend.encode(text) for text in texts]
    differ = []

    def encode(number):
        for turn in range(number, number + 40):
            at = turn % len(texts)
            if (
                frontend.layout(messages[at], []).token_ids != alone[at]
                or frontend.encode(texts[at]) != plain[at]
            ):
                differ.append(at)

    threads = [threading.Thread(target=encode, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert differ == []
    assert not any(thread.is_alive() for thread in threads)


def called(arguments):
    function = {"name": "f", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    return asked(messages=[{"role": "assistant", "tool_calls": [call]}]).messages


DIGITS = "1" * 401


def read(arguments):
    """What the template gets."""
    ((turn,), _) = conversation(called(arguments))
    return turn["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    "arguments",
    [f'{{"x": "{DIGITS}"}}', f'{{"{DIGITS}": 1}}', f'{{"x": "a\\"{DIGITS}", "y": ["\\\\", "{DIGITS}"]}}'],
)
def test_digits_in_a_string_of_arguments_are_no_number(arguments):
    assert read(arguments) == json.loads(arguments)


@pytest.mark.parametrize("arguments", [f'["", {DIGITS}', f'"a" {DIGITS}'])
def test_a_long_number_of_arguments_is_found_between_strings(arguments):
    with pytest.raises(ApiError, match="more than 400 digits"):
        read(arguments)


@pytest.mark.parametrize("arguments", [f'{{"x": {DIGITS}}}', f'{{"x": "\\\\", "y": {DIGITS}}}'])
def test_a_long_number_that_a_model_wrote_stays_text(arguments):
    assert read(arguments) == arguments


@pytest.mark.parametrize(
    ("more", "most"),
    [({}, 50), ({"max_tokens": 7}, 7), ({"max_completion_tokens": 8, "max_tokens": 7}, 8), ({"max_tokens": 51}, 50)],
)  # fmt: skip
async def test_a_request_gets_the_tokens_it_asks_for_within_its_room(intake, frontend, more, most):
    prompt = tokens_of(frontend, asked())
    assert (await prepare(intake, asked(**more), prompt + 50)).sampling.max_tokens == most


async def test_the_third_of_three_media_is_one_too_many(intake):
    error = await refusal(intake, media("image", "image", "image"))
    assert (error.status, error.code) == (400, "too_many_media")
    assert error.param == "messages[0].content[2].image_url.url"
    assert "has 3 media items, more than the limit of 2" in error.message


@pytest.mark.parametrize(("takes", "words"), [({"image", "audio"}, "audio, image"), (set(), "text only")])
async def test_refusing_an_unsupported_medium_names_what_the_model_takes(frontend, takes, words):
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


async def test_a_companion_has_the_negative_prompt_or_the_prompts_last_token(intake, frontend):
    prepared = await prepare(intake, asked(guidance_scale=3, negative_prompt="a blue square"))
    turn = [{"role": "user", "content": [{"type": "text", "text": "a blue square"}]}]
    assert prepared.guidance == Guidance(3.0, frontend.layout(turn, []).token_ids)
    prepared = await prepare(intake, asked(guidance_scale=1.5))
    assert prepared.guidance == Guidance(1.5, prepared.layout.token_ids[-1:])


async def test_an_answer_has_the_room_that_the_longer_prompt_leaves(intake, frontend):
    long = "what nobody wants to read here, " * 4
    prepared = await prepare(intake, asked(guidance_scale=3, negative_prompt=long, max_tokens=99), 120)
    assert prepared.sampling.max_tokens == 120 - prepared.companion_tokens
    assert prepared.companion_tokens > len(prepared.layout.token_ids)


async def test_an_unlimited_guided_answer_fits_one_context_with_its_companion(intake):
    prepared = await prepare(intake, asked(guidance_scale=3, negative_prompt="no", max_tokens=None), 200)
    prompts = len(prepared.layout.token_ids) + prepared.companion_tokens
    assert 200 - 1 <= prompts + 2 * prepared.sampling.max_tokens <= 200
    prepared = await prepare(intake, asked(guidance_scale=3, negative_prompt="no", max_tokens=None), prompts)
    assert prepared.sampling.max_tokens == 1


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


CURVES: dict[str, Callable[[int], int]] = {
    "as many for each frame": lambda frames: 10 * frames,
    "as many for each pair": lambda frames: 30 * -(-frames // 2),
    "all have a share of a budget": lambda frames: min(10 * frames, 4000) + frames // 4,
    "few and then very many": lambda frames: frames if frames < 700 else 100 * frames,
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("counts", [[1024], [4096, 1024, 1], [5, 9]])
@pytest.mark.parametrize("part", [0.001, 0.2, 0.7, 0.99])
async def test_as_many_frames_as_fit_are_found_in_few_steps(
    curve: str, counts: list[int], part: float
) -> None:
    steps = list[int]()

    def laid_out_with(frames: list[int]) -> PromptLayout:
        media = [
            MediumLayout("video", 1, [(0, 1)], {}, SamplingPlan(frame_indices=list(range(count))), 1)
            for count in frames
        ]
        return PromptLayout([0] * sum(map(CURVES[curve], frames)), media)

    async def laid_out(choices: Sequence[SamplingChoice]) -> tuple[PromptLayout, None]:
        frames = [min(c, choice.max_frames or c) for c, choice in zip(counts, choices, strict=True)]
        steps.append(max(frames))
        return laid_out_with(frames), None

    whole = laid_out_with(counts)
    least = len(laid_out_with([min(2, count) for count in counts]).token_ids)
    wanted = least + int(part * (len(whole.token_ids) - least))
    found = await with_fewer_frames(whole, [NO_CHOICE] * len(counts), Fit(wanted, wanted), laid_out)
    kept = [len(medium.sampling.frame_indices) for medium in found.media]
    assert len(found.token_ids) <= wanted
    assert [medium.omitted_frames for medium in found.media] == [
        a - b for a, b in zip(counts, kept, strict=True)
    ]
    assert min(b - min(2, a) for a, b in zip(counts, kept, strict=True)) >= 0
    longest = max(kept)
    more = [max(min(2, count), count * (longest + 1) // max(counts)) for count in counts]
    assert len(laid_out_with(more).token_ids) > wanted, "one more would not fit"
    assert len(steps) <= PROPORTIONAL_STEPS + 1 + max(counts).bit_length()
