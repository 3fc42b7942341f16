"""Every malformed request gets an OpenAI-shaped error that names the field and the remedy, and disturbs nothing else."""

from __future__ import annotations

import base64
import io
import json
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmd_api.contract.answers import MAX_GRAMMAR_CHARACTERS, Grammar
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.body import JsonScanner, LongNumberError, TooDeepError
from mmd_workers.gateway.content.chat_request import parse_chat_request
from mmd_workers.gateway.content.response_format import MAX_SCHEMA_CHARACTERS
from mmd_workers.model.frontend import HfFrontend
from tests.gateway.running import Launch, Running

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


def video(**choice: object) -> dict:
    return {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}, **choice}


def called(arguments: object) -> dict:
    """An assistant's message with one tool call."""
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


CALL = called('{"x": 1}')
RESULT = {"role": "tool", "content": "2", "tool_call_id": "1"}

SCHEMA = "response_format.json_schema.schema"


def schema(value: object, **more: object) -> dict:
    form = {"name": "answer", "schema": value, **more}
    return body(response_format={"type": "json_schema", "json_schema": form})


def tools(*functions: dict, **more: object) -> dict:
    return body(tools=[{"type": "function", "function": function} for function in functions], **more)


CASES: list[tuple[str, dict, int, str | None, str]] = [
    ("no model", body(model=...), 400, "model", "missing"),
    ("another model", body(model="gpt-5"), 404, "model", "builtin/demo"),
    ("a model that is a number", body(model=5), 400, "model", "string"),
    ("no messages", body(messages=...), 400, "messages", "missing"),
    ("empty messages", body(messages=[]), 400, "messages", "at least 1"),
    ("messages that are a string", body(messages="hello"), 400, "messages", "list"),
    ("a message that is a string", body(messages=["hello"]), 400, "messages[0]", "dictionary"),
    ("a message without role", body(messages=[{"content": "x"}]), 400, "messages[0].role", "missing"),
    ("an unknown role", body(messages=[{"role": "wizard", "content": "x"}]), 400, "messages[0].role", "unknown role 'wizard'; use system, developer, user, assistant or tool"),
    ("a role that is a list", body(messages=[{"role": ["user"], "content": "x"}]), 400, "messages[0].role", "unknown role"),
    ("the result of a function", body(messages=[{"role": "function", "content": "x", "name": "f"}]), 400, "messages[0].role", "or tool"),
    ("a tool message without id", body(messages=[{"role": "tool", "content": "x"}]), 400, "messages[0].tool_call_id", "missing"),
    ("a tool message without call", body(messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}]), 400, "messages[0].tool_call_id", "no tool call before this message has the id '1'"),
    ("a result before its call", body(messages=[RESULT, CALL]), 400, "messages[0].tool_call_id", "before their results"),
    ("a result that is of an unknown type", body(messages=[CALL, {**RESULT, "content": [{"type": "picture"}]}]), 400, "messages[1].content[0]", "unknown part type 'picture'; use text, input_text, image_url"),
    ("a tool call without function", body(messages=[{"role": "assistant", "tool_calls": [{"id": "1"}]}]), 400, "messages[0].tool_calls[0].function", "missing"),
    ("a tool call of another type", body(messages=[{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "function": {"name": "f", "arguments": "{}"}}]}]), 400, "messages[0].tool_calls[0].type", "'function'"),
    ("arguments that are an object", body(messages=[called({})]), 400, "messages[0].tool_calls[0].function.arguments", "string"),
    ("arguments that are no JSON", body(messages=[called("x{")]), 400, "messages[0].tool_calls[0].function.arguments", "send an object as JSON"),
    ("arguments that are a list", body(messages=[called("[1]")]), 400, "messages[0].tool_calls[0].function.arguments", "must be an object"),
    ("arguments that are a string", body(messages=[called('"{x"')]), 400, "messages[0].tool_calls[0].function.arguments", "must be an object"),
    ("arguments like a bomb", body(messages=[called("[" * 60_000)]), 400, "messages[0].tool_calls[0].function.arguments", "no valid JSON"),
    ("arguments of many values", body(messages=[called('{"x": [' + "[]," * 30_000 + "[]]}")] * 2), 400, "messages[1].tool_calls[0].function.arguments", "more than 65536 brackets"),
    ("a number in arguments after a string", body(messages=[called('["x\\"1", "1", ' + "1" * 401 + "]")]), 400, "messages[0].tool_calls[0].function.arguments", "more than 400 digits"),
    ("a number in arguments that takes its square to read", body(messages=[called("[" + "1" * 401 + "]")]), 400, "messages[0].tool_calls[0].function.arguments", "more than 400 digits"),
    ("129 tool calls", body(messages=[{"role": "assistant", "tool_calls": CALL["tool_calls"] * 129}]), 400, "messages[0].tool_calls", "at most 128"),
    ("tool calls of a user", body(messages=[{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}]), 400, "messages[0].tool_calls", "remove it"),
    ("a turn with content and a refusal", body(messages=[{"role": "assistant", "content": "x", "refusal": "no"}]), 400, "messages[0]", "not both"),
    ("a turn that says nothing", body(messages=[{"role": "assistant", "content": None}]), 400, "messages[0]", "neither tool_calls nor refusal"),
    ("a refusal of a user", body(messages=user({"type": "refusal", "refusal": "no"})), 400, "messages[0].content[0]", "unknown part type 'refusal'"),
    ("content that is null", body(messages=[{"role": "user", "content": None}]), 400, "messages[0].content", "string or a list"),
    ("content that is empty", body(messages=[{"role": "user", "content": []}]), 400, "messages[0].content", "at least 1"),
    ("a part without type", body(messages=user({"text": "x"})), 400, "messages[0].content[0].type", "missing"),
    ("an unknown part", body(messages=user({"type": "smell"})), 400, "messages[0].content[0]", "image_url, video_url"),
    ("a text part without text", body(messages=user({"type": "text"})), 400, "messages[0].content[0].text", "missing"),
    ("an image without url", body(messages=user(TEXT, {"type": "image_url", "image_url": {}})), 400, "messages[0].content[1].image_url.url", "missing"),
    ("an image url that is a string", body(messages=user({"type": "image_url", "image_url": png()})), 400, "messages[0].content[0].image_url", "dictionary"),
    ("unknown detail", body(messages=user({"type": "image_url", "image_url": {"url": png(), "detail": "best"}})), 400, "messages[0].content[0].image_url.detail", "'auto', 'low', 'high' or 'original'"),
    ("a rate and a number of frames", body(messages=user(video(fps=1, num_frames=4))), 400, "messages[0].content[0]", "set fps or num_frames, not both"),
    ("a rate above the limit", body(messages=user(TEXT, video(fps=2.5))), 400, "messages[0].content[1].fps", "2.5 frames a second are more than the limit of 2; request fewer, or raise spec.gateway.media.video.framesPerSecondMilli"),
    ("more frames than the limit", body(messages=user(video(num_frames=65))), 400, "messages[0].content[0].num_frames", "raise spec.gateway.media.video.maxFrames"),
    ("more frames than the limit for all", body(mm_processor_kwargs={"num_frames": 65}), 400, "mm_processor_kwargs.num_frames", "raise spec.gateway.media.video.maxFrames"),
    ("a way to sample that is unknown", body(messages=user(video(sampling="random"))), 400, "messages[0].content[0].sampling", "'uniform', 'keyframes' or 'scene_changes'"),
    ("key frames by number", body(messages=user(video(sampling="keyframes", num_frames=4))), 400, "messages[0].content[0]", "bound the others by max_frames"),
    ("scene changes by rate for all", body(mm_processor_kwargs={"sampling": "scene_changes", "fps": 1}), 400, "mm_processor_kwargs", "bound the others by max_frames"),
    ("seconds and a number of frames", body(messages=user(video(timestamps=[1], num_frames=4))), 400, "messages[0].content[0]", "set timestamps without fps, num_frames and sampling"),
    ("seconds and a way to sample", body(messages=user(video(timestamps=[1], sampling="uniform"))), 400, "messages[0].content[0]", "set timestamps without fps, num_frames and sampling"),
    ("no seconds", body(messages=user(video(timestamps=[]))), 400, "messages[0].content[0].timestamps", "at least 1"),
    ("seconds that go back", body(messages=user(TEXT, video(timestamps=[1, 0.5]))), 400, "messages[0].content[1].timestamps", "must be in ascending order"),
    ("a second before the beginning", body(messages=user(video(timestamps=[-1, 0]))), 400, "messages[0].content[0].timestamps[0]", "greater than or equal to 0"),
    ("a second that is no number", body(messages=user(video(timestamps=["1"]))), 400, "messages[0].content[0].timestamps[0]", "number"),
    ("more seconds than the limit", body(messages=user(video(timestamps=[0] * 65))), 400, "messages[0].content[0].timestamps", "65 frames are more than the limit of 64; request fewer, or raise spec.gateway.media.video.maxFrames"),
    ("more seconds than any limit", body(messages=user(video(timestamps=[0] * 4097))), 400, "messages[0].content[0].timestamps", "at most 4096"),
    ("seconds for all videos", body(mm_processor_kwargs={"timestamps": [1]}), 400, "mm_processor_kwargs.timestamps", "unknown field"),
    ("a rate of 0", body(messages=user(video(fps=0))), 400, "messages[0].content[0].fps", "greater than 0"),
    ("fewer pixels than the least", body(messages=user({**IMAGE, "min_pixels": 9, "max_pixels": 8})), 400, "messages[0].content[0]", "min_pixels must be at most max_pixels"),
    ("more pixels than the limit", body(messages=user(TEXT, {**IMAGE, "max_pixels": 50_000_001})), 400, "messages[0].content[1].max_pixels", "50000001 are more than the limit of 50000000; request fewer, or raise spec.gateway.media.image.maxPixels"),
    ("more pixels than the limit for all", body(mm_processor_kwargs={"min_pixels": 50_000_001}), 400, "mm_processor_kwargs.min_pixels", "raise spec.gateway.media.image.maxPixels"),
    ("more pixels than the model's", body(messages=user(TEXT, {**IMAGE, "max_pixels": 4097})), 400, "messages[0].content[1].image_url.url", "max_pixels: 4097 are more than this model's processor makes of an image, which is 4096"),
    ("an unknown option of processors", body(mm_processor_kwargs={"crop": 1}), 400, "mm_processor_kwargs.crop", "unknown field"),
    ("frames that are not sampled", body(mm_processor_kwargs={"do_sample_frames": False}), 400, "mm_processor_kwargs.do_sample_frames", "True"),
    ("options of decoders", body(media_io_kwargs={"video": {"num_frames": 4}}), 400, "media_io_kwargs", "use mm_processor_kwargs"),
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
    ("65 stops", body(stop=["a"] * 65), 400, "stop", "stop: send at most 64 entries"),
    ("long stops", body(stop=["a" * 205] * 5), 400, "stop", "stop: has 1025 characters; use at most 1024 in all strings"),
    ("an empty stop", body(stop=""), 400, "stop", "at least 1"),
    ("a stop that is a number", body(stop=5), 400, "stop", "a string or a list"),
    ("stop with an empty string in it", body(stop=["a", ""]), 400, "stop[1]", "at least 1"),
    ("a seed beyond 64 bits", body(seed=2**70), 400, "seed", "less than"),
    ("top_logprobs alone", body(top_logprobs=3), 400, "top_logprobs", "logprobs: true"),
    ("too many top_logprobs", body(logprobs=True, top_logprobs=21), 400, "top_logprobs", "less than or equal to 20"),
    ("stream options without stream", body(stream_options={"include_usage": True}), 400, "stream_options", "stream: true"),
    ("a typo in stream options", body(stream=True, stream_options={"continuous_usage": True}), 400, "stream_options.continuous_usage", "unknown field"),
    ("stream that is a string", body(stream="yes"), 400, "stream", "boolean"),
    ("effort that does not exist", body(reasoning_effort="most"), 400, "reasoning_effort", "'none'"),
    ("another tier", body(service_tier="gold"), 400, "service_tier", "'auto', 'default'"),
    ("all log probabilities of a prompt", body(prompt_logprobs=-1), 400, "prompt_logprobs", "greater than or equal to 0"),
    ("log probabilities of a prompt in a stream", body(prompt_logprobs=1, stream=True), 400, "prompt_logprobs", "not sent in a stream; omit stream or prompt_logprobs"),
    ("a prompt that is cut to nothing", body(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens", "must be at least 1, or -1"),
    ("a prompt that is cut to less", body(truncate_prompt_tokens=-2), 400, "truncate_prompt_tokens", "must be at least 1, or -1"),
    ("a part of a token", body(truncate_prompt_tokens=1.5), 400, "truncate_prompt_tokens", "integer"),
    ("the user's message goes on", body(continue_final_message=True), 400, "messages[0]", "continue_final_message requires a last message of the assistant"),
    ("calls that go on", body(messages=[{"role": "user", "content": "x"}, called("{}")], continue_final_message=True), 400, "messages[1]", "continue_final_message requires"),
    (
        "an answer that goes on and begins", body(continue_final_message=True, add_generation_prompt=True), 400, "continue_final_message",
        "add_generation_prompt and continue_final_message exclude each other",
    ),
    (
        "an answer that goes on beside a negative prompt",
        body(messages=[{"role": "assistant", "content": "x"}], continue_final_message=True, guidance_scale=2, negative_prompt="y"), 400, "negative_prompt",
        "set negative_prompt or continue_final_message",
    ),
    ("an answer without beginning", body(add_generation_prompt=False), 400, "add_generation_prompt", "omit it"),
    ("a search for the best beam", body(use_beam_search=True), 400, "use_beam_search", "use n"),
    ("a priority", body(priority=1), 400, "priority", "the operator"),
    ("a typo beside fields of vLLM", body(skip_special_token=True), 400, "skip_special_token", "unknown field"),
    ("a variable of templates", body(chat_template_kwargs={"enable_thinkin": True}), 400, "chat_template_kwargs.enable_thinkin", "unknown field"),
    ("another mark for caches", body(messages=user({**TEXT, "cache_control": {"type": "forever"}})), 400, "messages[0].content[0].cache_control.type", "'ephemeral'"),
    ("an id that is a number", body(messages=[{"role": "user", "id": 1, "content": "x"}]), 400, "messages[0].id", "string"),
    ("a search", body(web_search_options={}), 400, "web_search_options", "not supported"),
    ("functions", body(functions=[{"name": "f"}]), 400, "functions", "use tools"),
    ("a tool without function", body(tools=[{"type": "function"}]), 400, "tools[0].function", "missing"),
    ("a tool of another type", body(tools=[{"type": "web_search"}]), 400, "tools[0].type", "'function'"),
    ("a tool without name", tools({}), 400, "tools[0].function.name", "missing"),
    ("a tool with a space in its name", tools({"name": "a b"}), 400, "tools[0].function.name", "pattern"),
    ("a tool with a long name", tools({"name": "a" * 129}), 400, "tools[0].function.name", "pattern"),
    ("a tool with an unknown field", tools({"name": "f", "returns": {}}), 400, "tools[0].function.returns", "remove it"),
    ("two tools of one name", tools({"name": "f"}, {"name": "f"}), 400, "tools[1].function.name", "another tool has the name 'f'"),
    ("129 tools", tools(*[{"name": f"f{i}"} for i in range(129)]), 400, "tools", "at most 128"),
    ("parameters that are a list", tools({"name": "f", "parameters": []}), 400, "tools[0].function.parameters", "dictionary"),
    ("parameters that are a string", tools({"name": "f", "parameters": {"type": "string"}}), 400, "tools[0].function.parameters", "type must be 'object'"),
    ("parameters that are too long", tools({"name": "f", "parameters": {"title": "x" * 65_536}}), 400, "tools[0].function.parameters", "more than 65472 characters"),
    ("tools that are too long for a prompt", tools(*[{"name": f"f{i}", "description": "word " * 3000} for i in range(9)]), 400, "tools", " characters; shorten it"),
    ("tools that are too long for a grammar", tools(*[{"name": f"f{i}", "parameters": {"title": "x" * 40_000}} for i in range(2)], tool_choice="required"), 400, "tools", "more than 65536 characters together"),
    ("a tool that must match what is not enforced", tools({"name": "f", "strict": True, "parameters": {"not": {}}}), 400, "tools", "Unimplemented keys"),
    ("a tool that must match what explodes", tools({"name": "f", "parameters": {"properties": {str(i): {} for i in range(3000)}}}, tool_choice="required"), 400, "tools", "too big"),
    ("a tool with an integer that no float is", tools({"name": "f"}, {"name": "g", "strict": True, "parameters": {"enum": [2**53 + 1]}}), 400, "tools[1].function.parameters", "beyond"),
    ("a choice that is a number", tools({"name": "f"}, tool_choice=5), 400, "tool_choice", "none, auto, required or an object"),
    ("a choice of another word", tools({"name": "f"}, tool_choice="any"), 400, "tool_choice", "'required'"),
    ("a choice without tools", body(tool_choice="required"), 400, "tool_choice", "needs tools"),
    ("the choice of no tool", tools({"name": "f"}, tool_choice={"type": "function", "function": {"name": "g"}}), 400, "tool_choice.function.name", "no tool has the name 'g'"),
    ("a choice without name", tools({"name": "f"}, tool_choice={"type": "function"}), 400, "tool_choice.function", "missing"),
    ("the choice among no tools", tools({"name": "f"}, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}), 400, "tool_choice.allowed_tools.tools", "at least 1"),
    ("the choice among other tools", tools({"name": "f"}, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}}), 400, "tool_choice.allowed_tools.tools[0].function.name", "add it to tools"),
    ("a forced call without end", tools({"name": "f"}, tool_choice="required", ignore_eos=True), 400, "ignore_eos", "tool_choice decides"),
    ("a presence penalty above 2", body(presence_penalty=2.5), 400, "presence_penalty", "less than or equal to 2"),
    ("a frequency penalty below -2", body(frequency_penalty=-2.1), 400, "frequency_penalty", "greater than or equal to -2"),
    ("a repetition penalty of 0", body(repetition_penalty=0), 400, "repetition_penalty", "greater than or equal to 0.01"),
    ("min_p above 1", body(min_p=1.5), 400, "min_p", "less than or equal to 1"),
    ("a bias that is a list", body(logit_bias=[5]), 400, "logit_bias", "an object of token ids"),
    ("the bias of a word", body(logit_bias={"red": 1}), 400, "logit_bias", "'red' is not a token id"),
    ("the bias of a negative token", body(logit_bias={"-1": 1}), 400, "logit_bias", "'-1' is not a token id"),
    ("a token of forty digits", body(logit_bias={"1" * 40: 1}), 400, "logit_bias", "is not a token id"),
    ("a bias that is a string", body(logit_bias={"5": "1"}), 400, "logit_bias", "the bias of token 5 must be a number"),
    ("a bias of true", body(logit_bias={"5": True}), 400, "logit_bias", "the bias of token 5 must be a number"),
    ("a bias of 101", body(logit_bias={"5": 101}), 400, "logit_bias", "from -100 to 100"),
    ("1,025 biases", body(logit_bias={str(i): 1 for i in range(1025)}), 400, "logit_bias", "has 1025 tokens; use at most 1024"),
    ("a bias beyond the vocabulary", body(logit_bias={"5": 1, "99999": 1}), 400, "logit_bias", "token 99999, but the model's 543 tokens"),
    ("no allowed token", body(allowed_token_ids=[]), 400, "allowed_token_ids", "at least 1"),
    ("an allowed token that is negative", body(allowed_token_ids=[7, -1]), 400, "allowed_token_ids[1]", "greater than or equal to 0"),
    ("an allowed token beyond the vocabulary", body(allowed_token_ids=[543]), 400, "allowed_token_ids", "ids from 0 to 542"),
    ("1,025 allowed tokens", body(allowed_token_ids=[7] * 1025), 400, "allowed_token_ids", "at most 1024"),
    ("allowed placeholders alone", body(allowed_token_ids=[3, 4, 5]), 400, "allowed_token_ids", "allow another token"),
    ("an allowed token that is a bad word", body(allowed_token_ids=[346], bad_words=["red"]), 400, "allowed_token_ids", "allow another token"),
    ("an allowed token that may not come yet", body(allowed_token_ids=[2], min_tokens=1), 400, "allowed_token_ids", "allow another token"),
    ("a stop token that is a string", body(stop_token_ids=["7"]), 400, "stop_token_ids[0]", "integer"),
    ("a stop token beyond the vocabulary", body(stop_token_ids=[7, 543]), 400, "stop_token_ids", "token 543"),
    ("129 stop tokens", body(stop_token_ids=[7] * 129), 400, "stop_token_ids", "at most 128"),
    ("min_tokens below 0", body(min_tokens=-1), 400, "min_tokens", "greater than or equal to 0"),
    ("min_tokens above max_tokens", body(min_tokens=5), 400, "min_tokens", "at most max_tokens, which is 4"),
    ("guidance below 1", body(guidance_scale=0.5), 400, "guidance_scale", "greater than or equal to 1"),
    ("guidance above 100", body(guidance_scale=101), 400, "guidance_scale", "less than or equal to 100"),
    ("guidance that is a string", body(guidance_scale="2"), 400, "guidance_scale", "number"),
    ("a negative prompt without guidance", body(negative_prompt="no"), 400, "negative_prompt", "requires guidance_scale"),
    ("a negative prompt that is a list", body(guidance_scale=2, negative_prompt=["no"]), 400, "negative_prompt", "string"),
    ("a negative prompt that is too long", body(guidance_scale=2, negative_prompt="no " * 2000), 400, "negative_prompt", "fit; shorten it"),
    ("a bad word that is empty", body(bad_words=["red", ""]), 400, "bad_words[1]", "at least 1"),
    ("a bad word of spaces", body(bad_words=["red", "  "]), 400, "bad_words[1]", "more than spaces"),
    ("a bad word of 129 characters", body(bad_words=["x" * 129]), 400, "bad_words[0]", "at most 128"),
    ("129 bad words", body(bad_words=["red"] * 129), 400, "bad_words", "at most 128"),
    ("bad words of many tokens", body(bad_words=[f"{i:03}" + "z" * 100 for i in range(20)]), 400, "bad_words", "more than the limit of 1024"),
    ("an unknown response format", body(response_format={"type": "xml"}), 400, "response_format.type", "'json_object'"),
    ("a response format that is a string", body(response_format="json"), 400, "response_format", "dictionary"),
    ("json_schema without one", body(response_format={"type": "json_schema"}), 400, "response_format", "requires json_schema"),
    ("a schema beside json_object", body(response_format={"type": "json_object", "json_schema": {"name": "x", "schema": {}}}), 400, "response_format", "no other type has it"),
    ("a schema without name", body(response_format={"type": "json_schema", "json_schema": {"schema": {}}}), 400, "response_format.json_schema.name", "missing"),
    ("a named nothing", body(response_format={"type": "json_schema", "json_schema": {"name": "x"}}), 400, SCHEMA, "missing"),
    ("an integer that no float is", schema({"enum": [2**53 + 1]}), 400, SCHEMA, "beyond"),
    ("a schema that is a list", schema([]), 400, SCHEMA, "dictionary"),
    ("a schema of no type", schema({"type": "colour"}), 400, SCHEMA, "colour"),
    ("a keyword that is not enforced", schema({"not": {"type": "string"}}, strict=True), 400, SCHEMA, "remove not, or send the schema in response_format or in tools without strict"),
    ("uniqueItems", schema({"type": "array", "uniqueItems": True}, strict=True), 400, SCHEMA, "remove uniqueItems, or"),
    ("a format that is not enforced", schema({"type": "string", "format": "password"}, strict=True), 400, SCHEMA, "Unknown format: password; remove format, or"),
    ("alternatives that overlap", schema({"oneOf": [{"type": "string"}, {"minLength": 1}]}, strict=True), 400, SCHEMA, "remove oneOf, or"),
    ("structured outputs that are not enforced", body(structured_outputs={"json": {"not": {}}}), 400, "structured_outputs.json", "remove not, or"),
    ("a remote schema", schema({"$ref": "https://example.com/schema.json"}), 400, SCHEMA, "does not fetch"),
    ("a schema in a file", schema({"$ref": "file:///etc/passwd"}), 400, SCHEMA, "does not fetch"),
    ("a schema that is only itself", schema({"$ref": "#"}), 400, SCHEMA, "cannot be compiled"),
    ("a schema that nothing matches", schema({"type": "string", "minLength": 3, "maxLength": 2}), 400, SCHEMA, "Unsatisfiable"),
    ("a schema that explodes", schema({"allOf": [{"anyOf": [{"type": "object", "properties": {f"{i}{j}": {"type": "integer", "minimum": j}}} for j in range(4)]} for i in range(8)]}), 400, SCHEMA, "too large"),
    ("a schema with 3,000 properties", schema({"type": "object", "properties": {str(i): {} for i in range(3000)}}), 400, SCHEMA, "too big"),
    ("a schema with 1,000 optional properties", schema({"type": "object", "properties": {str(i): {} for i in range(1000)}}), 400, SCHEMA, "items; max is 2000"),
    ("a schema of 80 kB", schema({"enum": ["x" * 80_000]}), 400, SCHEMA, "more than 65472"),
    ("options for the library", schema({"type": "object", "not": {}, "x-guidance": {"lenient": True}}, strict=True), 400, SCHEMA, "Unimplemented keys"),
    ("a broken pattern", schema({"type": "string", "pattern": "^(a"}), 400, SCHEMA, "unclosed group"),
    ("a broken regex", body(structured_outputs={"regex": "(a"}), 400, "structured_outputs.regex", "unclosed group"),
    ("a grammar", body(structured_outputs={"grammar": "start: nothing"}), 400, "structured_outputs.grammar", "unknown field"),
    ("no structured output", body(structured_outputs={}), 400, "structured_outputs", "exactly one"),
    ("two structured outputs", body(structured_outputs={"regex": "a", "choice": ["b"]}), 400, "structured_outputs", "exactly one"),
    ("no choices", body(structured_outputs={"choice": []}), 400, "structured_outputs.choice", "at least 1"),
    ("2,000 choices", body(structured_outputs={"choice": ["x"] * 2000}), 400, "structured_outputs.choice", "at most 1024"),
    ("choices of 40 kB", body(structured_outputs={"choice": ["x" * 4000] * 10}), 400, "structured_outputs.choice", "send fewer"),
    ("two forms", body(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}), 400, "structured_outputs", "not both"),
    ("an answer that may not end", body(response_format={"type": "json_object"}, ignore_eos=True), 400, "ignore_eos", "omit one"),
    ("allowed tokens beside a form", body(response_format={"type": "json_object"}, allowed_token_ids=[7]), 400, "allowed_token_ids", "omit one"),
    ("bad words beside a form", body(structured_outputs={"regex": "a"}, bad_words=["red"]), 400, "bad_words", "omit one"),
    ("least tokens beside a form", body(structured_outputs={"regex": "a"}, min_tokens=2), 400, "min_tokens", "omit one"),
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


TEXTS: list[tuple[str, bytes, str]] = [
    ("the first half of an emoji", rb"cut \ud83d", "cut \ufffd"),
    ("the second half of an emoji", rb"\uDE00 cut", "\ufffd cut"),
    ("halves around a whole", rb"\ud83d\ud83d\ude00\ude00", "\ufffd\U0001f600\ufffd"),
    ("halves in the wrong order", rb"\ude00\ud83d", "\ufffd\ufffd"),
    ("a half after a backslash", rb"\\\ud83d\\", "\\\ufffd\\"),
    ("a half beside what is spelled like one", rb"\ud83d \\ud83d", "\ufffd \\ud83d"),
    ("what is spelled like a half", rb"\\ud83d", "\\ud83d"),
    ("a half behind what is spelled like its other one", rb"\\ud83d\ude00", "\\ud83d\ufffd"),
]


async def test_half_of_a_surrogate_pair_is_read_as_a_replacement_character(launch: Launch, subtests) -> None:
    gateway = await launch()
    for name, spelled, text in TEXTS:
        with subtests.test(name):
            sent = b'{"model": "builtin/demo", "prompt": "%b"}' % spelled
            answer = await gateway.http.post(
                "/tokenize", content=sent, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 200, answer.text
            plain = await gateway.http.post("/tokenize", json={"model": MODEL, "prompt": text})
            assert answer.json() == plain.json()


async def test_a_body_with_half_a_surrogate_pair_must_be_valid_otherwise(launch: Launch) -> None:
    gateway = await launch()
    for spelled in (b'"\\ud83d\0\0"', b'"\\ud83d', b'"\\ud83"', b'"\\ud83d\\x"'):
        answer = await gateway.http.post(
            "/tokenize",
            content=b'{"model": "builtin/demo", "prompt": %b}' % spelled,
            headers={"content-type": "application/json"},
        )
        assert_is_error(answer, 400, None, "valid JSON")


async def test_a_body_of_more_surrogate_pairs_than_are_searched_for_halves_is_refused(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search runs on the loop that all streams share."""
    monkeypatch.setattr("mmd_workers.gateway.basics.body.MAX_SURROGATES", 4)
    gateway = await launch()
    for pairs, status in ((1, 200), (2, 400)):
        spelled = rb"\ud83d\ude00" * pairs + rb"\ud83d"
        answer = await gateway.http.post(
            "/tokenize",
            content=b'{"model": "builtin/demo", "prompt": "%b"}' % spelled,
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == status, answer.text


async def test_a_byte_order_mark_is_skipped(launch: Launch) -> None:
    gateway = await launch()
    plain = b'{"model": "builtin/demo", "prompt": "red"}'
    answers = [
        await gateway.http.post("/tokenize", content=sent, headers={"content-type": "application/json"})
        for sent in (plain, b"\xef\xbb\xbf" + plain)
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json() == answers[1].json()


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


def test_a_field_without_effect_is_not_held_during_the_request() -> None:
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
    assert_is_error(response, 400, "messages", "tokens > 4095 maximum")
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_a_too_long_prompt_is_rejected_with_excess_and_largest_part(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle", max_model_len=20)
    long = {"type": "text", "text": "circle " * 30}
    response = await gateway.http.post("/v1/chat/completions", json=body(messages=user(long)))
    assert_is_error(response, 400, "messages", "context length is 20 tokens; the largest part is the text")
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


LENIENTLY: dict[str, dict] = {
    "the sets of pydantic": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
    "its secrets": {"type": "string", "format": "password"},
    "the records of Zod": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
    "a negation": {"type": "string", "not": {"const": "red"}},
    "alternatives that overlap": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 1}]},
}


@pytest.mark.parametrize("name", LENIENTLY)
async def test_a_schema_that_is_not_strict_is_followed_as_far_as_it_goes(launch: Launch, name: str) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    value = LENIENTLY[name]
    parameters = {"type": "object", "properties": {"x": value}}
    for sent in (
        schema(value),
        schema(value, strict=False),
        tools({"name": "f", "parameters": parameters}, tool_choice="required"),
    ):
        response = await gateway.http.post("/v1/chat/completions", json=sent)
        assert response.status_code == 200, response.text
        assert worker.requests[-1].sampling.grammar is not None
    for sent in (schema(value, strict=True), tools({"name": "f", "parameters": parameters, "strict": True})):
        response = await gateway.http.post("/v1/chat/completions", json=sent)
        assert response.status_code == 400, response.text


def test_the_longest_schema_has_room_for_its_options() -> None:
    longest = {"title": "x" * (MAX_SCHEMA_CHARACTERS - len('{"title":""}'))}
    request = parse_chat_request(schema(longest))
    grammar, _ = request.grammar()
    assert MAX_SCHEMA_CHARACTERS < len(grammar.source) <= MAX_GRAMMAR_CHARACTERS


async def test_what_a_lenient_schema_says_is_enforced(launch: Launch, frontend: HfFrontend) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    sent = schema({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True})
    assert (await gateway.http.post("/v1/chat/completions", json=sent)).status_code == 200
    grammar = worker.requests[0].sampling.grammar
    for text, follows in (("[1, 2]", True), ("[1, 1]", True), ("[3]", False), ('"1"', False)):
        matcher = frontend.grammars.begin(grammar).matcher
        ids = gateway.ids(text)
        assert (matcher.try_consume_tokens(ids) == len(ids)) == follows, text


async def test_values_that_mean_off_are_taken(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    neutral = body(
        functions=None, function_call="none", presence_penalty=0, frequency_penalty=0.0, logit_bias={}, n=1, user="me",
        response_format={"type": "text"}, modalities=["text"], store=False, metadata={"a": "b"}, top_k=-1, service_tier="auto", reasoning_effort="high", verbosity="low", parallel_tool_calls=True,
        prediction={"type": "content", "content": "x"}, prompt_cache_retention="24h", tools=[], tool_choice="auto",
        min_p=0, repetition_penalty=1, min_tokens=0, stop_token_ids=[], bad_words=[], allowed_token_ids=None,
        guidance_scale=1, negative_prompt="what nobody computes",
        use_beam_search=False, length_penalty=1.0, early_stopping=False, prompt_logprobs=None, truncate_prompt_tokens=None,
        return_tokens_as_token_ids=False, logits_processors=[], priority=0, request_id="mine", add_generation_prompt=True,
        continue_final_message=False, add_special_tokens=False, documents=[], chat_template=None, chat_template_kwargs={},
        skip_special_tokens=True, spaces_between_special_tokens=True, include_stop_str_in_output=False, include_reasoning=True,
    )  # fmt: skip
    response = await gateway.http.post("/v1/chat/completions", json=neutral)
    assert response.status_code == 200, response.text
    assert worker.requests[0].sampling.rules is None
    assert worker.requests[0].guidance is None


@pytest.mark.parametrize("tier", ["default", "flex", "priority", "scale"])
async def test_hints_about_the_whole_request_are_taken(launch: Launch, tier: str) -> None:
    gateway = await launch()
    await gateway.worker("the red circle")
    sent = body(store=True, service_tier=tier)
    assert (await gateway.http.post("/v1/chat/completions", json=sent)).status_code == 200


async def test_hints_about_parts_and_messages_change_nothing_of_the_prompt(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    hints = {"cache_control": {"type": "ephemeral"}}
    marked = [{**TEXT, **hints}, {**IMAGE, **hints, "uuid": "one"}]
    for messages in (user(TEXT, IMAGE), [{**user(*marked)[0], "id": "msg_1"}]):
        sent = body(messages=messages)
        assert (await gateway.http.post("/v1/chat/completions", json=sent)).status_code == 200
    first, second = worker.requests
    assert first.token_ids == second.token_ids
    assert first.features == second.features


RULES: dict[str, object] = {
    "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"7": 1},
    "allowed_token_ids": [7], "bad_words": ["red"],
}  # fmt: skip


async def test_what_vllm_does_not_apply_to_drafts_is_refused_by_name(launch: Launch, subtests) -> None:
    drafts = {"speculative": {"method": "ngram", "numSpeculativeTokens": 3}}
    gateway = await launch(engine={"type": "VLLM", "decode": drafts})
    worker = await gateway.worker("the red circle")
    forced = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}
    for name, value in {**RULES, "tool_choice": "required"}.items():
        more = forced if name == "tool_choice" else {}
        with subtests.test(name):
            response = await gateway.http.post("/v1/chat/completions", json=body(**{**more, name: value}))
            assert_is_error(response, 400, name, "remove spec.engine.decode.speculative")
    with subtests.test("guidance_scale"):
        response = await gateway.http.post("/v1/chat/completions", json=body(guidance_scale=2))
        assert_is_error(response, 400, "guidance_scale", "set spec.engine.type to Native")
    off = body(
        frequency_penalty=0, repetition_penalty=1, min_p=0, logit_bias={}, min_tokens=2, stop_token_ids=[9],
        guidance_scale=1,
    )  # fmt: skip
    response = await gateway.http.post("/v1/chat/completions", json=off)
    assert response.status_code == 200, response.text
    assert len(worker.requests) == 1


async def test_a_form_reaches_the_worker_as_a_grammar(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    recursive = {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}
    for asked in [
        body(response_format={"type": "json_object"}, n=2),
        schema(recursive, strict=True),
        body(structured_outputs={"json": {"type": "boolean"}}),
        body(structured_outputs={"regex": "[ab]+"}),
        body(structured_outputs={"choice": ['"yes"', "nein\n"]}),
        body(structured_outputs={"choice": ["".join(map(chr, range(32, 128))), "\x01\u2028ä😀"]}),
    ]:
        response = await gateway.http.post("/v1/chat/completions", json=asked)
        assert response.status_code == 200, response.text
    grammars = [request.sampling.grammar for request in worker.requests]
    assert grammars[0] == grammars[1] == Grammar("json_schema", '{"type":"object"}')
    assert json.loads(grammars[2].source) == recursive
    assert [(grammar.type, grammar.source) for grammar in grammars[3:]] == [
        ("json_schema", '{"type":"boolean"}'),
        ("regex", "[ab]+"),
        ("regex", '"yes"|nein\\\n'),
        ("regex", "|".join(map(re.escape, ["".join(map(chr, range(32, 128))), "\x01\u2028ä😀"]))),
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


async def test_a_slash_at_the_end_of_a_path_is_dropped_and_redirects_nobody(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker("the red circle")
    paths = ("/v1/chat/completions", "/v1/messages", "/tokenize", "/openapi.json", "/v1/models", "/health")
    for path in paths:
        for port in (gateway.http, gateway.admin):
            for method in ("GET", "POST"):
                plain = await port.request(method, path, json=body())
                response = await port.request(
                    method, f"{path}/", json=body(), headers={"host": "127.0.0.1:81"}
                )
                assert response.status_code == plain.status_code, (method, path)
                assert "location" not in response.headers
                twice = await port.request(method, f"{path}//", json=body())
                assert twice.status_code in (404, 405), (method, path)


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
def test_a_long_number_is_found_wherever_the_chunks_are_cut(size: int) -> None:
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
