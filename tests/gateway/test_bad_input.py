"""Every malformed request gets an OpenAI-shaped error that names the field and the remedy, and disturbs nothing else."""

from __future__ import annotations

import base64
import io
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmd_api.contract.answers import Grammar
from mmd_workers.gateway.api_errors import ApiError
from mmd_workers.gateway.body import JsonScanner, LongNumberError, TooDeepError
from mmd_workers.gateway.chat_request import parse_chat_request
from mmd_workers.model.frontend import HfFrontend

from .running import Launch, Running

MODEL = "builtin/demo"


def png(width: int = 56, height: int = 56) -> str:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def user(*parts: object) -> list[dict]:
    return [{"role": "user", "content": list(parts) if parts else "hello"}]


def body(**changes: object) -> dict:
    made = {"model": MODEL, "messages": user(), "max_tokens": 4}
    made.update(changes)
    return {key: value for key, value in made.items() if value is not ...}


TEXT = {"type": "text", "text": "what is it?"}
IMAGE = {"type": "image_url", "image_url": {"url": png()}}


def image(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


SCHEMA = "response_format.json_schema.schema"


def schema(value: object) -> dict:
    return body(response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": value}})


CASES: list[tuple[str, dict, int, str | None, str]] = [
    ("no model", body(model=...), 400, "model", "missing"),
    ("another model", body(model="gpt-5"), 404, "model", "builtin/demo"),
    ("a model that is a number", body(model=5), 400, "model", "string"),
    ("no messages", body(messages=...), 400, "messages", "missing"),
    ("empty messages", body(messages=[]), 400, "messages", "at least 1"),
    ("messages that are a string", body(messages="hello"), 400, "messages", "list"),
    ("a message that is a string", body(messages=["hello"]), 400, "messages[0]", "dictionary"),
    ("a message without role", body(messages=[{"content": "x"}]), 400, "messages[0].role", "missing"),
    ("an unknown role", body(messages=[{"role": "wizard", "content": "x"}]), 400, "messages[0].role", "'user'"),
    ("a tool message", body(messages=[{"role": "tool", "content": "x"}]), 400, "messages[0].role", "'user'"),
    ("a turn with tool calls", body(messages=[{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]), 400, "messages[0].tool_calls", "remove it"),
    ("a turn with a refusal", body(messages=[{"role": "assistant", "content": "x", "refusal": "no"}]), 400, "messages[0].refusal", "remove it"),
    ("content that is null", body(messages=[{"role": "user", "content": None}]), 400, "messages[0].content", "string or a list"),
    ("content that is empty", body(messages=[{"role": "user", "content": []}]), 400, "messages[0].content", "at least 1"),
    ("a part without type", body(messages=user({"text": "x"})), 400, "messages[0].content[0].type", "missing"),
    ("an unknown part", body(messages=user({"type": "smell"})), 400, "messages[0].content[0]", "image_url, video_url"),
    ("a text part without text", body(messages=user({"type": "text"})), 400, "messages[0].content[0].text", "missing"),
    ("an image without url", body(messages=user(TEXT, {"type": "image_url", "image_url": {}})), 400, "messages[0].content[1].image_url.url", "missing"),
    ("an image url that is a string", body(messages=user({"type": "image_url", "image_url": png()})), 400, "messages[0].content[0].image_url", "dictionary"),
    ("low detail", body(messages=user({"type": "image_url", "image_url": {"url": png(), "detail": "low"}})), 400, "messages[0].content[0].image_url.detail", "'auto'"),
    ("a sound without format", body(messages=user({"type": "input_audio", "input_audio": {"data": "AAAA"}})), 400, "messages[0].content[0].input_audio.format", "missing"),
    ("NaN temperature as a string", body(temperature="nan"), 400, "temperature", "number"),
    ("a negative temperature", body(temperature=-0.1), 400, "temperature", "greater than or equal to 0"),
    ("a temperature above 2", body(temperature=2.5), 400, "temperature", "less than or equal to 2"),
    ("top_p of 0", body(top_p=0), 400, "top_p", "greater than 0"),
    ("top_p above 1", body(top_p=1.1), 400, "top_p", "less than or equal to 1"),
    ("top_k below -1", body(top_k=-2), 400, "top_k", "greater than or equal to -1"),
    ("max_tokens of 0", body(max_tokens=0), 400, "max_tokens", "greater than or equal to 1"),
    ("max_tokens that is a float", body(max_tokens=1.5), 400, "max_tokens", "integer"),
    ("both token limits", body(max_completion_tokens=4), 400, "max_completion_tokens", "not both"),
    ("n of 0", body(n=0), 400, "n", "greater than or equal to 1"),
    ("n of 1000", body(n=1000), 400, "n", "less than or equal to 16"),
    ("five stops", body(stop=["a", "b", "c", "d", "e"]), 400, "stop", "at most 4"),
    ("an empty stop", body(stop=""), 400, "stop", "at least 1"),
    ("a stop that is a number", body(stop=5), 400, "stop", "a string or a list"),
    ("stop with an empty string in it", body(stop=["a", ""]), 400, "stop[1]", "at least 1"),
    ("a seed beyond 64 bits", body(seed=2**70), 400, "seed", "less than"),
    ("top_logprobs alone", body(top_logprobs=3), 400, "top_logprobs", "logprobs: true"),
    ("too many top_logprobs", body(logprobs=True, top_logprobs=21), 400, "top_logprobs", "less than or equal to 20"),
    ("stream options without stream", body(stream_options={"include_usage": True}), 400, "stream_options", "stream: true"),
    ("stream that is a string", body(stream="yes"), 400, "stream", "boolean"),
    ("tools", body(tools=[{"type": "function"}]), 400, "tools", "not supported: describe"),
    ("an unknown response format", body(response_format={"type": "xml"}), 400, "response_format.type", "'json_object'"),
    ("a response format that is a string", body(response_format="json"), 400, "response_format", "dictionary"),
    ("json_schema without one", body(response_format={"type": "json_schema"}), 400, "response_format", "requires json_schema"),
    ("a schema beside json_object", body(response_format={"type": "json_object", "json_schema": {"name": "x", "schema": {}}}), 400, "response_format", "no other type has it"),
    ("a schema without name", body(response_format={"type": "json_schema", "json_schema": {"schema": {}}}), 400, "response_format.json_schema.name", "missing"),
    ("a named nothing", body(response_format={"type": "json_schema", "json_schema": {"name": "x"}}), 400, SCHEMA, "missing"),
    ("a schema that is a list", schema([]), 400, SCHEMA, "dictionary"),
    ("a schema of no type", schema({"type": "colour"}), 400, SCHEMA, "colour"),
    ("a keyword that is not enforced", schema({"not": {"type": "string"}}), 400, SCHEMA, "Unimplemented keys"),
    ("uniqueItems", schema({"type": "array", "uniqueItems": True}), 400, SCHEMA, "uniqueItems"),
    ("a remote schema", schema({"$ref": "https://example.com/schema.json"}), 400, SCHEMA, "does not fetch"),
    ("a schema in a file", schema({"$ref": "file:///etc/passwd"}), 400, SCHEMA, "does not fetch"),
    ("a schema that is only itself", schema({"$ref": "#"}), 400, SCHEMA, "cannot be compiled"),
    ("a schema that nothing matches", schema({"type": "string", "minLength": 3, "maxLength": 2}), 400, SCHEMA, "Unsatisfiable"),
    ("a schema that explodes", schema({"allOf": [{"anyOf": [{"type": "object", "properties": {f"{i}{j}": {"type": "integer", "minimum": j}}} for j in range(4)]} for i in range(8)]}), 400, SCHEMA, "too large"),
    ("a schema with 6,000 properties", schema({"type": "object", "properties": {str(i): {} for i in range(6000)}}), 400, SCHEMA, "too big"),
    ("a schema with 1,000 optional properties", schema({"type": "object", "properties": {str(i): {} for i in range(1000)}}), 400, SCHEMA, "items; max is 2000"),
    ("a schema of 80 kB", schema({"enum": ["x" * 80_000]}), 400, SCHEMA, "more than 65536"),
    ("options for the library", schema({"type": "object", "not": {}, "x-guidance": {"lenient": True}}), 400, SCHEMA, "Unimplemented keys"),
    ("a broken pattern", schema({"type": "string", "pattern": "^(a"}), 400, SCHEMA, "unclosed group"),
    ("a broken regex", body(structured_outputs={"regex": "(a"}), 400, "structured_outputs.regex", "unclosed group"),
    ("a broken grammar", body(structured_outputs={"grammar": "start: nothing"}), 400, "structured_outputs.grammar", "cannot be compiled"),
    ("no structured output", body(structured_outputs={}), 400, "structured_outputs", "exactly one"),
    ("two structured outputs", body(structured_outputs={"regex": "a", "choice": ["b"]}), 400, "structured_outputs", "exactly one"),
    ("no choices", body(structured_outputs={"choice": []}), 400, "structured_outputs.choice", "at least 1"),
    ("2,000 choices", body(structured_outputs={"choice": ["x"] * 2000}), 400, "structured_outputs.choice", "at most 1024"),
    ("choices of 40 kB", body(structured_outputs={"choice": ["x" * 4000] * 10}), 400, "structured_outputs.choice", "send fewer"),
    ("two forms", body(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}), 400, "structured_outputs", "not both"),
    ("an answer that may not end", body(response_format={"type": "json_object"}, ignore_eos=True), 400, "ignore_eos", "omit one"),
    ("a presence penalty", body(presence_penalty=0.5), 400, "presence_penalty", "set it to 0"),
    ("logit bias", body(logit_bias={"5": 1}), 400, "logit_bias", "omit it"),
    ("an unknown field", body(colour="red"), 400, "colour", "unknown field colour; remove it"),
    ("many unknown fields", body(c=1, a=2, b=3, d=4), 400, "c", "unknown fields c, a, b, ...; remove them"),
    ("unknown fields of a part", body(messages=user({**TEXT, "x": 1, "y": 2})), 400, "messages[0].content[0].x", "messages[0].content[0].x, messages[0].content[0].y; remove them"),
    ("a type that is a number", body(messages=user({"type": 5})), 400, "messages[0].content[0]", "unknown part type '5'"),
    ("an image that is text", body(messages=user(TEXT, image("data:image/png;base64,aGVsbG8="))), 400, "messages[0].content[1].image_url.url", "format"),
    ("an image with broken base64", body(messages=user(image("data:image/png;base64,@@@@"))), 400, "messages[0].content[0].image_url.url", "base64"),
    ("a truncated image", body(messages=user(image(png()[:46]))), 400, "messages[0].content[0].image_url.url", ""),
    ("a picture sent as video", body(messages=user({"type": "video_url", "video_url": {"url": png()}})), 400, "messages[0].content[0].video_url.url", "declared as video"),
    ("a file url", body(messages=user(image("file:///etc/passwd"))), 400, "messages[0].content[0].image_url.url", "http(s)"),
    ("a private address", body(messages=user(image("http://127.0.0.1/x.png"))), 400, "messages[0].content[0].image_url.url", "not public"),
    ("the cloud's metadata address", body(messages=user(image("http://169.254.169.254/latest/meta-data"))), 400, "messages[0].content[0].image_url.url", "not public"),
    ("a sound that is no sound", body(messages=user({"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}})), 400, "messages[0].content[0].input_audio.data", "format"),
    ("17 images", body(messages=user(*[IMAGE] * 17)), 400, "messages[0].content[16].image_url.url", "the limit of 16"),
    ("4,000 images", body(messages=user(*[image("data:,x")] * 4000)), 400, "messages[0].content[16].image_url.url", "4000 media"),
    ("5,000 parts", body(messages=user(*[{"type": "text", "text": "x"}] * 5000)), 400, "messages[0].content", "at most 4096"),
]  # fmt: skip


async def assert_still_serves(gateway: Running) -> None:
    answer = await gateway.http.post("/v1/chat/completions", json=body(temperature=0))
    assert answer.status_code == 200, answer.text
    assert await gateway.metric("mmd_media_held_bytes") == 0
    assert await gateway.metric("mmd_gateway_sequences") == 0


def assert_is_error(response: httpx.Response, status: int, param: str | None, says: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert says in error["message"], error
    assert len(error["message"]) < 2000
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert error["code"]


async def test_each_malformed_body_gets_an_error_that_names_the_field(launch: Launch, subtests) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    for name, sent, status, param, says in CASES:
        with subtests.test(name):
            assert_is_error(await gateway.http.post("/v1/chat/completions", json=sent), status, param, says)
    assert worker.requests == []
    await assert_still_serves(gateway)


RAW: list[tuple[str, bytes, dict, int, str]] = [
    ("nothing", b"", {}, 400, "valid JSON"),
    ("half of a JSON", b'{"model": "builtin/demo", "messages": [', {}, 400, "valid JSON"),
    ("NaN", json.dumps(body(temperature=float("nan"))).encode(), {}, 400, "valid JSON"),
    ("infinity", json.dumps(body(top_p=float("inf"))).encode(), {}, 400, "valid JSON"),
    ("bytes that are not UTF-8", b'{"model": "\xff\xfe"}', {}, 400, "valid JSON"),
    ("a list", b"[1, 2]", {}, 400, "JSON object"),
    ("null", b"null", {}, 400, "JSON object"),
    (
        "a number that takes its square to read",
        b'{"seed": ' + b"1" * 401 + b"}",
        {},
        400,
        "more than 400 digits",
    ),
    ("a JSON bomb of brackets", b"[" * 100_000, {}, 400, "nested deeper than 32"),
    ("a page's bytes of no type", b"{}", {"content-type": ""}, 415, "application/json"),
    ("a page's plain text", b"{}", {"content-type": "text/plain"}, 415, "application/json"),
    ("a form", b"model=x", {"content-type": "application/x-www-form-urlencoded"}, 415, "application/json"),
    ("gzip", b"\x1f\x8b", {"content-encoding": "gzip"}, 415, "content-encoding"),
    ("a body over the limit", b'{"model": "' + b"x" * (1 << 20) + b'"}', {}, 413, "maxBodyMebibytes"),
]


async def test_each_malformed_byte_stream_gets_its_status(launch: Launch, subtests) -> None:
    gateway = await launch(maxBodyMebibytes=1)
    await gateway.worker("the red circle")
    for name, content, headers, status, says in RAW:
        with subtests.test(name):
            response = await gateway.http.post(
                "/v1/chat/completions",
                content=content,
                headers={"content-type": "application/json", **headers},
            )
            assert_is_error(response, status, None, says)
    await assert_still_serves(gateway)


async def test_a_body_of_unknown_length_is_cut_off_at_the_limit(launch: Launch) -> None:
    gateway = await launch(maxBodyMebibytes=1)
    sent = 0

    async def endless():
        nonlocal sent
        yield b'{"model": "'
        for _ in range(64):
            sent += 1
            yield b"x" * (64 << 10)

    response = await gateway.http.post(
        "/v1/chat/completions", content=endless(), headers={"content-type": "application/json"}
    )
    assert_is_error(response, 413, None, "maxBodyMebibytes")


def test_what_has_no_effect_is_not_held_for_the_time_of_a_request() -> None:
    assert parse_chat_request(body(metadata={"x": "A" * 1000})).metadata is None
    with pytest.raises(ApiError, match="metadata"):
        parse_chat_request(body(metadata="A"))


async def test_a_text_of_megabytes_is_refused_before_it_is_tokenized(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await launch()
    await gateway.worker("the red circle")
    monkeypatch.setattr(HfFrontend, "layout", lambda *_: pytest.fail("the text was tokenized"))
    parts = [{"type": "text", "text": "circle " * 200_000}] * 3
    response = await gateway.http.post("/v1/chat/completions", json=body(messages=user(*parts)))
    assert_is_error(response, 400, "messages", "at most 4095 fit")
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_a_too_long_prompt_is_rejected_with_the_excess_and_the_largest_part(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle", max_model_len=20)
    long = {"type": "text", "text": "circle " * 30}
    response = await gateway.http.post("/v1/chat/completions", json=body(messages=user(long)))
    assert_is_error(response, 400, "messages", "too many; the largest part is the text")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    by_image = await gateway.http.post("/v1/chat/completions", json=body(messages=user(image(png(224, 224)))))
    assert_is_error(
        by_image, 400, "messages[0].content[0].image_url.url", "the largest part is messages[0].content[0]"
    )
    assert worker.requests == []


async def test_more_tokens_than_fit_are_clamped_to_what_fits(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle", max_model_len=200)
    await gateway.http.post("/v1/chat/completions", json=body(max_tokens=10**6))
    await gateway.http.post("/v1/chat/completions", json=body(max_tokens=...))
    prompt = len(worker.requests[0].token_ids)
    assert [r.sampling.max_tokens for r in worker.requests] == [200 - prompt] * 2


async def test_values_that_mean_off_are_taken(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker("the red circle")
    neutral = body(
        tools=None, tool_choice="none", presence_penalty=0, frequency_penalty=0.0, logit_bias={}, n=1, user="me",
        response_format={"type": "text"}, modalities=["text"], store=False, metadata={"a": "b"}, top_k=-1, service_tier="auto",
    )  # fmt: skip
    response = await gateway.http.post("/v1/chat/completions", json=neutral)
    assert response.status_code == 200, response.text


async def test_a_form_reaches_the_worker_as_a_grammar(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    recursive = {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}
    for asked in [
        body(response_format={"type": "json_object"}, n=2),
        schema(recursive),
        body(structured_outputs={"json": {"type": "boolean"}}),
        body(structured_outputs={"regex": "[ab]+"}),
        body(structured_outputs={"choice": ['"yes"', "nein\n"]}),
        body(structured_outputs={"grammar": 'start: "a" start | "b"'}),
    ]:
        response = await gateway.http.post("/v1/chat/completions", json=asked)
        assert response.status_code == 200, response.text
    grammars = [request.sampling.grammar for request in worker.requests]
    assert grammars[0] == grammars[1] == Grammar("json_schema", '{"type":"object"}')
    assert json.loads(grammars[2].source) == recursive
    assert [(grammar.type, grammar.source) for grammar in grammars[3:]] == [
        ("json_schema", '{"type":"boolean"}'),
        ("regex", "[ab]+"),
        ("lark", r'start: "\"yes\"" | "nein\n"'),
        ("lark", 'start: "a" start | "b"'),
    ]


async def test_unknown_paths_and_methods_get_errors_of_the_same_shape(launch: Launch) -> None:
    gateway = await launch()
    for response, status in [
        (await gateway.http.get("/v1/nothing"), 404),
        (await gateway.http.get("/v1/chat/completions"), 405),
        (await gateway.http.get("/v1/models/gpt-5"), 404),
        (await gateway.admin.get("/debug/requests/none"), 404),
    ]:
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def too_deep(limit: int, text: bytes, cuts: list[int]) -> bool:
    scanner, at = JsonScanner(max_depth=limit), 0
    try:
        for size in [*cuts, len(text)]:  # a chunk may be empty
            scanner.feed(text[at : at + size])
            at += size
    except TooDeepError:
        return True
    return False


def test_brackets_in_strings_are_not_depth_wherever_the_chunks_are_cut() -> None:
    text = json.dumps({"a": ["[[[[", '\\"[[[[', {"b": "}}}}" + "\\"}]}).encode()
    for size in range(1, 12):
        assert not too_deep(3, text, [size] * len(text))
        assert too_deep(2, text, [size] * len(text))


@pytest.mark.parametrize("size", [1, 7, 300, 400, 401, 402, 4000])
def test_a_number_is_as_long_as_it_is_wherever_the_chunks_are_cut(size: int) -> None:
    def feed(digits: int) -> None:
        scanner, text = JsonScanner(), b'{"n": ' + b"1" * 399 + b', "seed": ' + b"1" * digits + b"}"
        for at in range(0, len(text), size):
            scanner.feed(text[at : at + size])

    feed(400)
    with pytest.raises(LongNumberError):
        feed(401)


@given(st.text(alphabet='a"\\[]{}', max_size=40), st.lists(st.integers(0, 6), min_size=1, max_size=20))
def test_brackets_are_counted_as_by_one_who_reads_every_character(text: str, cuts: list[int]) -> None:
    """Up to a backslash outside of a string, which no parser reads beyond."""
    deepest, depth, in_string, escaped = 0, 0, False, False
    for at, character in enumerate(text):
        if escaped:
            escaped = False
        elif in_string:
            escaped, in_string = character == "\\", character != '"'
        elif character == '"':
            in_string = True
        elif character == "\\":
            text = text[:at]
            break
        else:
            depth += (character in "[{") - (character in "]}")
            deepest = max(deepest, depth)
    assert too_deep(2, text.encode(), cuts) == (deepest > 2)
