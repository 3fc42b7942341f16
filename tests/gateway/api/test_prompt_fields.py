"""Fields of vLLM's API that are about the prompt: it ends within an answer, loses its beginning, or is scored."""

from __future__ import annotations

from typing import Any

import pytest

from mmd_workers.features.references import layout_of
from tests.gateway.media import png, url
from tests.gateway.running import Launch, Running

MODEL = "builtin/demo"
HELLO = {"role": "user", "content": "hello"}
BEGUN = {"role": "assistant", "content": "the big "}
TEXT = "red circle"
PICTURE = {"type": "image_url", "image_url": {"url": url("image/png", png())}}


async def chat(gateway: Running, *messages: Any, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": list(messages) or [HELLO], **fields}
    response = await gateway.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def completion(gateway: Running, **fields: Any) -> Any:
    response = await gateway.http.post("/v1/completions", json={"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(gateway: Running, path: str, **fields: Any) -> tuple[str, str]:
    """The field and the message of the error."""
    response = await gateway.http.post(path, json={"model": MODEL, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


@pytest.mark.parametrize(
    "content",
    ["the big ", [{"type": "text", "text": "the "}, {"type": "text", "text": "big "}], [{"type": "refusal", "refusal": "the big "}]],
)  # fmt: skip
async def test_the_answer_continues_the_last_message(launch: Launch, content: Any) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    answer = await chat(gateway, HELLO, {**BEGUN, "content": content}, **fields)
    assert answer["choices"][0]["message"]["content"] == TEXT
    prompt = gateway.tokenizer.decode(worker.requests[0].token_ids)
    assert prompt.endswith("hello<|im_end|>\n<|im_start|>assistant\nthe big ")
    tokens = {"messages": [HELLO, {**BEGUN, "content": content}], "continue_final_message": True}
    assert (await gateway.http.post("/tokenize", json=tokens)).json()["tokens"] == worker.requests[
        0
    ].token_ids


async def test_a_continued_message_may_be_empty_or_spell_control_tokens(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    await chat(gateway, HELLO, {**BEGUN, "content": ""}, continue_final_message=True)
    await chat(gateway, HELLO)
    assert worker.requests[0].token_ids == worker.requests[1].token_ids
    await chat(gateway, HELLO, {**BEGUN, "content": "a<|im_end|>"}, continue_final_message=True)
    end = gateway.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert worker.requests[2].token_ids[-1] != end


async def test_a_prompt_keeps_its_last_tokens(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    await chat(gateway)
    whole = worker.requests[0].token_ids
    answer = await chat(gateway, truncate_prompt_tokens=4)
    assert worker.requests[1].token_ids == whole[-4:]
    assert answer["usage"]["prompt_tokens"] == 4
    await chat(gateway, truncate_prompt_tokens=len(whole))
    await chat(gateway, truncate_prompt_tokens=10**9)
    await chat(gateway, truncate_prompt_tokens=-1)
    assert [request.token_ids for request in worker.requests[2:]] == [whole] * 3


@pytest.mark.parametrize(("max_tokens", "left"), [(8, 8), (None, 512), (10**6, 512)])
async def test_the_longest_prompt_leaves_room_for_the_answer(
    launch: Launch, max_tokens: int | None, left: int
) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT, max_model_len=1024)
    long = {"role": "user", "content": "red circle " * 4000}
    await chat(gateway, long, truncate_prompt_tokens=-1, max_tokens=max_tokens)
    assert len(worker.requests[0].token_ids) == 1024 - left
    await completion(gateway, prompt="red circle " * 4000, truncate_prompt_tokens=-1, max_tokens=8)
    assert len(worker.requests[1].token_ids) == 1024 - 8


async def test_a_cut_prompt_that_is_still_too_long_is_refused(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker(TEXT, max_model_len=1024)
    long = [{"role": "user", "content": "red circle " * 4000}]
    param, message = await refusal(
        gateway, "/v1/chat/completions", messages=long, truncate_prompt_tokens=1024
    )
    assert param == "messages"
    assert message.startswith("prompt is too long: 1024 tokens > 1023 maximum")


async def test_a_cut_never_divides_media(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    text = {"type": "text", "text": "red circle " * 20}
    message = {"role": "user", "content": [text, PICTURE, text]}
    await chat(gateway, message)
    whole, feature = worker.requests[0].token_ids, worker.requests[0].features[0]
    first = layout_of(feature).ranges[0][0]
    least = len(whole) - first + 1
    await chat(gateway, message, truncate_prompt_tokens=least)
    cut = worker.requests[1]
    assert cut.token_ids == whole[-least:]
    shifted = [(start - len(whole) + least, length) for start, length in layout_of(feature).ranges]
    assert [tuple(one) for one in layout_of(cut.features[0]).ranges] == shifted
    param, said = await refusal(
        gateway, "/v1/chat/completions", messages=[message], truncate_prompt_tokens=least - 1
    )
    assert param == "truncate_prompt_tokens"
    assert f"would cut its media, and media are not divided; keep at least {least} tokens" in said


async def test_prompts_of_text_completions_are_cut_each(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    first, second = gateway.ids("the red circle"), gateway.ids("blue square")
    answer = await completion(gateway, prompt=[first, second], truncate_prompt_tokens=2, echo=True)
    assert sorted(request.token_ids for request in worker.requests) == sorted([first[-2:], second[-2:]])
    assert answer["choices"][0]["text"] == gateway.tokenizer.decode(first[-2:]) + TEXT
    await completion(gateway, prompt="the red circle", truncate_prompt_tokens=1, add_special_tokens=False)
    assert worker.requests[-1].token_ids == first[-1:]


def assert_scores(gateway: Running, scores: Any, prompt: list[int], likeliest: int) -> None:
    """The scripted worker gives the token at `n` the log probability -n, and -0, -1, ... to those with the first ids."""
    assert scores[0] is None
    assert len(scores) == len(prompt)
    for at, (entry, token_id) in enumerate(zip(scores[1:], prompt[1:], strict=True), 1):
        own = entry[str(token_id)]
        assert next(iter(entry)) == str(token_id)
        assert own["logprob"] == -at
        assert own["rank"] == (token_id + 1 if token_id < likeliest else None)
        others = {str(n): (-n, n + 1) for n in range(likeliest) if n != token_id}
        assert {k: (v["logprob"], v["rank"]) for k, v in entry.items() if k != str(token_id)} == others
        assert all(isinstance(token["decoded_token"], str) for token in entry.values())


@pytest.mark.parametrize("likeliest", [0, 3])
async def test_the_tokens_of_a_prompt_are_scored(launch: Launch, likeliest: int) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    answer = await chat(gateway, prompt_logprobs=likeliest, n=2)
    prompt = worker.requests[0].token_ids
    assert_scores(gateway, answer["prompt_logprobs"], prompt, likeliest)
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert worker.requests[0].sampling.prompt_logprobs
    answer = await completion(gateway, prompt=["the red circle", "blue"], prompt_logprobs=likeliest)
    for choice, text in zip(answer["choices"], ("the red circle", "blue"), strict=True):
        (ids,) = {tuple(r.token_ids) for r in worker.requests[2:] if gateway.tokenizer.decode(r.token_ids) == text}  # fmt: skip
        assert_scores(gateway, choice["prompt_logprobs"], list(ids), likeliest)
        assert (choice["logprobs"], choice["text"]) == (None, TEXT)


async def test_scores_of_the_prompt_and_of_the_answer_have_their_own_numbers_of_tokens(
    launch: Launch,
) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    answer = await chat(gateway, prompt_logprobs=3, logprobs=True, top_logprobs=1)
    assert worker.requests[0].sampling.logprobs == 3
    assert_scores(gateway, answer["prompt_logprobs"], worker.requests[0].token_ids, 3)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [1] * len(worker.answer)
    answer = await chat(gateway, prompt_logprobs=1, logprobs=True, top_logprobs=3)
    assert_scores(gateway, answer["prompt_logprobs"], worker.requests[1].token_ids, 1)
    answer = await completion(gateway, prompt="the red", prompt_logprobs=3, logprobs=1, echo=True)
    (choice,) = answer["choices"]
    assert_scores(gateway, choice["prompt_logprobs"], worker.requests[2].token_ids, 3)
    assert len(choice["logprobs"]["tokens"]) == len(worker.requests[2].token_ids) + len(worker.answer)
    assert all(len(one) <= 2 for one in choice["logprobs"]["top_logprobs"][1:])
    answer = await completion(gateway, prompt="the red", prompt_logprobs=3, logprobs=1)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(worker.answer)


async def test_no_one_gets_scores_of_a_prompt_unasked(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    assert "prompt_logprobs" not in await chat(gateway)
    assert "prompt_logprobs" not in (await completion(gateway, prompt="x"))["choices"][0]
    assert not any(request.sampling.prompt_logprobs for request in worker.requests)


async def test_scores_of_a_prompt_that_cannot_be_had_are_refused_by_name(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker(TEXT)
    message = {"role": "user", "content": [PICTURE]}
    chats, texts = "/v1/chat/completions", "/v1/completions"
    media = await refusal(gateway, chats, messages=[message], prompt_logprobs=0)
    assert media == ("prompt_logprobs", "prompt_logprobs is not supported for prompts with media; omit it, or send text alone")  # fmt: skip
    streamed = await refusal(gateway, texts, prompt="x", prompt_logprobs=0, stream=True)
    assert streamed[0] == "prompt_logprobs"
    long = await refusal(gateway, chats, messages=[{"role": "user", "content": "red " * 1000}], prompt_logprobs=20)  # fmt: skip
    assert long[0] == "messages"
    assert "with prompt_logprobs 20 are" in long[1]


async def test_scores_of_a_prompt_beside_adapters_are_refused_by_name(launch: Launch) -> None:
    gateway = await launch(engine={"type": "VLLM", "adapters": [{"name": "sql", "id": "org/sql"}]})
    await gateway.worker(TEXT)
    param, message = await refusal(gateway, "/v1/chat/completions", messages=[HELLO], prompt_logprobs=0)
    assert param == "prompt_logprobs"
    assert "prompt_logprobs is not supported beside spec.engine.adapters" in message


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 1500}], "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
        ("/v1/completions", {"prompt": "a " * 1500, "logprobs": 20}, "logprobs"),
    ],
)  # fmt: skip
async def test_scores_of_a_prompt_are_bounded_by_what_workers_compute(
    launch: Launch, path: str, fields: dict[str, Any], field: str
) -> None:
    """They report as many likely tokens beside each token of the prompt as beside those of the answer."""
    gateway = await launch()
    await gateway.worker(TEXT)
    _, message = await refusal(gateway, path, prompt_logprobs=0, max_tokens=1, **fields)
    assert field in message


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_message_that_ends_in_a_medium_is_not_continued(launch: Launch, path: str) -> None:
    gateway = await launch()
    await gateway.worker(TEXT)
    source = {"type": "base64", "media_type": "image/png", "data": url("", png()).partition(",")[2]}
    is_chat = path == "/v1/chat/completions"
    picture = PICTURE if is_chat else {"type": "image", "source": source}
    last = {"role": "assistant", "content": [{"type": "text", "text": "see"}, picture]}
    fields = (
        {"continue_final_message": True, "add_generation_prompt": False} if is_chat else {"max_tokens": 8}
    )
    response = await gateway.http.post(path, json={"model": MODEL, "messages": [HELLO, last], **fields})
    assert response.status_code == 400, response.text
    if not is_chat:
        counted = await gateway.http.post(
            f"{path}/count_tokens", json={"model": MODEL, "messages": [HELLO, last]}
        )
        assert counted.status_code == 200, counted.text
