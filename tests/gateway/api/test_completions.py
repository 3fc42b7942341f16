"""POST /v1/completions: prompts as text and as token ids, several at once, in OpenAI's shape, through the same life as a chat."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import pytest

from mmd_api.contract.sampling import Guidance
from mmd_workers.wire.messages.message_parts import Phase
from mmd_workers.wire.messages.prefill import GenerateRequest
from tests.gateway.running import HASTY_MILLISECONDS, Launch, Running
from tests.gateway.scripted import ScriptedWorker, answer_well, say_nothing

MODEL = "builtin/demo"
TEXT = "the red circle"


async def ask(gateway: Running, stream: bool = False, **body: Any) -> Any:
    """The completion, as the official client reads it; a stream is joined to one."""
    made = {"model": MODEL, "prompt": "what is red", **body}
    if not stream:
        return await gateway.openai.completions.create(**made)
    joined: dict[int, Any] = {}
    usage = None
    async for chunk in await gateway.openai.completions.create(
        **made, stream=True, stream_options={"include_usage": True}
    ):
        assert chunk.object == "text_completion"
        usage = chunk.usage or usage
        for part in chunk.choices:
            if part.index not in joined:
                joined[part.index] = part
                continue
            whole = joined[part.index]
            whole.text += part.text
            whole.finish_reason = part.finish_reason or whole.finish_reason
            if part.logprobs:
                for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                    getattr(whole.logprobs, name).extend(getattr(part.logprobs, name))
    chunk.choices = [joined[index] for index in sorted(joined)]
    chunk.usage = usage
    return chunk


async def refused(gateway: Running, **body: Any) -> dict:
    response = await gateway.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "what is red", **body}
    )
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_text_is_continued_as_it_is(launch: Launch, stream: bool) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    answer = await ask(
        gateway, stream, prompt="<|im_start|>what is red", max_tokens=40, seed=3, stop=["never"]
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "stop", None)
    assert answer.id.startswith("cmpl-")
    (request,) = worker.requests
    assert request.token_ids == [1, *gateway.ids("what is red")], (
        "a control token is one, no template is applied"
    )
    assert (request.sampling.max_tokens, request.sampling.seed) == (40, 3)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        len(request.token_ids),
        len(worker.answer),
    )


async def test_an_answer_is_sixteen_tokens_long_unless_more_are_asked_for(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(list(range(20, 60)))
    answer = await ask(gateway)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")
    assert worker.requests[0].sampling.max_tokens == 16


@pytest.mark.parametrize("stream", [True, False])
async def test_prompts_of_every_kind_are_answered_in_their_order(launch: Launch, stream: bool) -> None:
    gateway = await launch()

    async def repeat(worker: ScriptedWorker, request: GenerateRequest) -> None:
        worker.answer = request.token_ids
        await worker.tokens(request, list(range(len(request.token_ids))))

    worker = await gateway.worker(TEXT, repeat)
    ids = [gateway.ids("red"), gateway.ids("the blue square")]
    for prompt in (["red", "the blue square"], ids):
        answer = await ask(gateway, stream, prompt=prompt, n=2, seed=7)
        assert [choice.text for choice in answer.choices] == ["red", "red", *["the blue square"] * 2]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == sum(map(len, ids)), "each prompt counts once"
    assert [r.sampling.seed for r in worker.requests] == [7, 8, 7, 8] * 2, (
        "a prompt draws the same beside others"
    )
    assert (await ask(gateway, stream, prompt=ids[1])).choices[0].text == "the blue square"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_echo_repeats_the_prompt_before_its_answer(launch: Launch, stream: bool) -> None:
    gateway = await launch()
    await gateway.worker(TEXT)
    answer = await ask(gateway, stream, prompt=["What? ", "Who? "], n=2, echo=True)
    assert [c.text for c in answer.choices] == [f"What? {TEXT}"] * 2 + [f"Who? {TEXT}"] * 2
    answer = await ask(gateway, stream, prompt=[1, *gateway.ids("What? ")], echo=True)
    assert answer.choices[0].text == f"<|im_start|>What? {TEXT}"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [0, 2])
async def test_an_echo_has_log_probabilities_of_the_prompt_then_the_answer(
    launch: Launch, stream: bool, count: int
) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    ids = [gateway.ids("What? Who?"), gateway.ids("red")[:1]]
    answer = await ask(gateway, stream, prompt=ids, logprobs=count, echo=True)
    for choice, prompt in zip(answer.choices, ids, strict=True):
        found = choice.logprobs
        assert "".join(found.tokens) == choice.text
        assert len(found.tokens) == len(prompt) + len(worker.answer)
        assert found.token_logprobs[: len(prompt)] == [None, *(-float(at) for at in range(1, len(prompt)))]
        assert found.token_logprobs[len(prompt) :] == [-0.25] * len(worker.answer)
        assert found.text_offset == [len("".join(found.tokens[:at])) for at in range(len(found.tokens))]
        if count:
            assert found.top_logprobs[0] is None
            assert all(found.top_logprobs[1:])
        else:
            assert not found.top_logprobs
    assert all(request.sampling.prompt_logprobs for request in worker.requests)


async def test_log_probabilities_of_a_prompt_come_from_vllm_too(launch: Launch) -> None:
    gateway = await launch(engine={"type": "VLLM"})
    worker = await gateway.worker(TEXT)
    answer = await ask(gateway, False, prompt="What? Who?", echo=True, logprobs=1)
    assert answer.choices[0].logprobs.token_logprobs[:2] == [None, -1.0]
    assert worker.requests[0].sampling.prompt_logprobs


async def test_an_echo_with_log_probabilities_beside_adapters_is_refused_by_name(launch: Launch) -> None:
    adapter = {"name": "sql", "id": "org/sql"}
    gateway = await launch(engine={"type": "VLLM", "adapters": [adapter]})
    worker = await gateway.worker(TEXT)
    error = await refused(gateway, prompt="What?", echo=True, logprobs=1)
    assert error["param"] == "logprobs"
    assert "beside spec.engine.adapters; omit one of them" in error["message"]
    await ask(gateway, False, prompt="What?", echo=True)
    assert len(worker.requests) == 1


async def test_negative_prompts_count_among_the_tokens_of_a_request(launch: Launch) -> None:
    gateway = await launch()
    error = await refused(
        gateway, prompt=["red"] * 64, guidance_scale=2, negative_prompt="red " * 3000, max_tokens=1
    )
    assert error["message"].startswith("prompt is too long: ")
    assert "negative ones included" in error["message"]


async def test_guidance_reaches_the_workers_of_every_prompt_and_choice(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    prompts = [gateway.ids("What? Who?"), gateway.ids("red")]
    guided = {"guidance_scale": 2.5, "negative_prompt": "blue square"}
    await ask(gateway, False, prompt=prompts, n=2, extra_body=guided)
    assert [r.guidance for r in worker.requests] == [Guidance(2.5, gateway.ids("blue square"))] * 4
    await ask(gateway, False, prompt=prompts, extra_body={"guidance_scale": 2})
    assert [r.guidance for r in worker.requests[4:]] == [Guidance(2.0, ids[-1:]) for ids in prompts]
    for negative in ("", "<|IMAGE|>"):
        error = await refused(gateway, prompt="What?", **(guided | {"negative_prompt": negative}))
        assert error["param"] == "negative_prompt"
        assert "at least one token, none of which stands for a medium" in error["message"]


async def test_an_echo_without_log_probabilities_asks_for_none(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    await ask(gateway, False, prompt="What?", echo=True)
    await ask(gateway, False, prompt="What?", logprobs=2)
    assert not any(request.sampling.prompt_logprobs for request in worker.requests)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [0, 2])
async def test_log_probabilities_are_lists_of_one_item_a_token(
    launch: Launch, stream: bool, count: int
) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    answer = await ask(gateway, stream, logprobs=count, n=2, extra_body={"return_token_ids": True})
    for choice in answer.choices:
        found = choice.logprobs
        assert "".join(found.tokens) == choice.text == TEXT
        assert found.token_logprobs == [-0.25] * len(worker.answer)
        assert found.text_offset == [len("".join(found.tokens[:at])) for at in range(len(found.tokens))]
        if count:
            assert [top[token] for top, token in zip(found.top_logprobs, found.tokens, strict=True)] == [
                -0.25
            ] * len(worker.answer)
            assert all(len(top) == count for top in found.top_logprobs)
        else:
            assert not found.top_logprobs
        if not stream:
            assert choice.token_ids == worker.answer


async def test_offsets_of_log_probabilities_are_places_in_the_text(launch: Launch) -> None:
    """Parts of a character are spelled as OpenAI's API spells them here."""
    gateway = await launch()
    await gateway.worker("the 😀 red")
    (choice,) = (await ask(gateway, logprobs=1)).choices
    parts = [rf"bytes:\x{byte:02x}" for byte in "😀".encode()]
    assert choice.text == "the 😀 red"
    assert choice.logprobs.tokens == ["t", "he", " ", *parts, " red"]
    assert choice.logprobs.text_offset == [0, 1, 3, 4, 5, 5, 5, 5]
    assert [next(iter(top)) for top in choice.logprobs.top_logprobs] == choice.logprobs.tokens


@pytest.mark.parametrize("stream", [True, False])
async def test_special_tokens_and_what_ends_an_answer_are_text_where_asked_for(
    launch: Launch, stream: bool
) -> None:
    gateway = await launch()
    mark, end = gateway.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    await gateway.worker([*gateway.ids("the red"), mark, *gateway.ids(" circle"), end])
    for fields, text in (
        ({}, "the red circle"),
        ({"skip_special_tokens": True, "include_stop_str_in_output": False}, "the red circle"),
        ({"skip_special_tokens": False}, "the red<|endoftext|> circle"),
        ({"include_stop_str_in_output": True}, "the red circle"),
        (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            "the red<|endoftext|> circle<|im_end|>",
        ),
        ({"stop": ["cir", "le"], "include_stop_str_in_output": True}, "the red cir"),
        ({"stop": ["cir", "le"]}, "the red "),
    ):
        answer = await ask(gateway, stream, extra_body=fields)
        assert [choice.text for choice in answer.choices] == [text], fields
        body = {"model": MODEL, "messages": [{"role": "user", "content": "where?"}], **fields}
        chat = (await gateway.http.post("/v1/chat/completions", json=body)).json()
        assert chat["choices"][0]["message"]["content"] == text, fields
        assert chat["choices"][0]["finish_reason"] == "stop"


CASES: list[tuple[str, dict, str, str]] = [
    ("no prompt", {"prompt": None}, "prompt", "prompt must be a string, a list of strings"),
    ("an empty prompt", {"prompt": ""}, "prompt", "is empty"),
    ("an empty list", {"prompt": []}, "prompt", "at least 1"),
    ("an empty prompt among others", {"prompt": ["red", ""]}, "prompt[1]", "is empty"),
    ("an object", {"prompt": {"text": "x"}}, "prompt", "a list of token ids"),
    ("mixed prompts", {"prompt": ["red", 1]}, "prompt[1]", "string"),
    ("a token that is a float", {"prompt": [1, 1.5]}, "prompt[1]", "integer"),
    ("a negative token", {"prompt": [[1], [2, -1]]}, "prompt[1][1]", "greater than or equal to 0"),
    ("a token that is none", {"prompt": [1, 99999]}, "prompt[1]", "has no token 99999; use 0 to"),
    ("a token for an image", {"prompt": [[30], [3]]}, "prompt[1]", "stands for a medium"),
    ("a text with an image's token", {"prompt": "what is <|IMAGE|>?"}, "prompt", "'<|IMAGE|>' stands for a medium"),
    ("65 prompts", {"prompt": ["x"] * 65}, "prompt", "at most 64"),
    ("more answers than fit", {"prompt": ["x"] * 5, "n": 13}, "prompt", "65 answers, more than the limit of 64"),
    ("a prompt as long as the context", {"prompt": [1] * 4096}, "prompt", "prompt is too long: 4096 tokens > 4095 maximum. This model's maximum context length is 4096 tokens; "),
    ("prompts of too many tokens", {"prompt": ["red " * 3000] * 60}, "prompt[43]", "the tokens of the prompts so far"),
    ("a text that cannot fit", {"prompt": ["x", "x" * 600_000]}, "prompt[1]", "tokens > 4095 maximum"),
    ("a suffix", {"suffix": "end"}, "suffix", "does not fill gaps"),
    ("best of two", {"best_of": 2}, "best_of", "use n"),
    ("more log probabilities than a message has", {"prompt": [1] * 900, "echo": True, "logprobs": 19}, "prompt", "18000 log probabilities, more than the limit of 16384"),
    ("too many log probabilities", {"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ("log probabilities as of a chat", {"logprobs": True}, "logprobs", "integer"),
    ("messages", {"messages": []}, "messages", "unknown field"),
    ("no tokens", {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ("options of a stream without one", {"stream_options": {}}, "stream_options", "stream: true"),
]  # fmt: skip


async def test_each_bad_prompt_gets_an_error_that_names_it(launch: Launch, subtests: Any) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    for name, body, param, says in CASES:
        with subtests.test(name):
            error = await refused(gateway, **body)
            assert error["param"] == param
            assert says in error["message"]
    assert worker.requests == []
    assert (await ask(gateway, best_of=1, suffix="", echo=False)).choices[0].text == TEXT


async def test_an_answer_that_can_never_fit_names_the_fields_of_this_path(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmd_workers.gateway.process import gateway_process

    monkeypatch.setattr(gateway_process, "host_bytes", lambda: 16 << 20)
    gateway = await launch()
    body = {"prompt": ["red"] * 16, "max_tokens": 1000, "logprobs": 20, "ignore_eos": True}
    error = await refused(gateway, **body)
    assert (error["code"], error["param"]) == ("too_large", "logprobs")
    assert "lower logprobs, prompt or max_tokens" in error["message"]


async def test_a_client_that_hangs_up_frees_every_answer(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT, say_nothing)
    asking = asyncio.create_task(ask(gateway, prompt=["red", "blue"], n=2))
    await worker.until(lambda: len(worker.requests) == 4)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await worker.until(lambda: not worker.running)
    await gateway.until_metric("mmd_gateway_sequences", 0)
    await gateway.until_metric("mmd_requests_running", 0)


async def test_an_answer_goes_on_at_another_pod_when_its_own_is_lost(launch: Launch) -> None:
    gateway = await launch(heartbeat_timeout_milliseconds=HASTY_MILLISECONDS)

    async def die(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.tokens(request, [0, 1], finish=False)
        await worker.die()

    await gateway.worker(TEXT, die)
    asking = asyncio.create_task(ask(gateway, stream=True))
    other = await gateway.worker(TEXT, pod="decode-9")
    assert (await asking).choices[0].text == TEXT
    assert all(r.output_token_ids in ([], other.answer[:2]) for r in other.requests)


async def test_a_completion_past_its_deadline_is_an_error(launch: Launch) -> None:
    gateway = await launch(requestTimeoutSeconds=5)
    await gateway.worker(TEXT, say_nothing)
    response = await gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": ["a", "b"]})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_completion_is_counted_and_its_cached_tokens_are_summed(launch: Launch) -> None:
    gateway = await launch()

    async def report(worker: ScriptedWorker, request: GenerateRequest) -> None:
        cached = {"cached_tokens": len(request.token_ids) - 1}
        await worker.phases(request, Phase("prefill", request.arrived, request.arrived + 0.01, cached))
        await answer_well(worker, request)

    await gateway.worker(TEXT, report)
    body = {"model": MODEL, "prompt": [[30, 31], [32, 33, 34]], "timings": True}
    response: httpx.Response = await gateway.http.post("/v1/completions", json=body)
    answer = response.json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert answer["timings"]["prefill"] > 0
    timeline = (await gateway.admin.get(f"/debug/requests/{answer['id']}")).json()
    assert timeline["finish_reasons"] == ["stop", "stop"]
    assert await gateway.metric("mmd_requests_total") == 1
