"""Writes conversations as text by the model's chat template. Independent of media, whose markers it only places."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from mmd_api.contract.errors import UnsupportedInputError
from mmd_api.contract.pools import MODALITIES
from mmd_workers.model import call_forms
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.control_tokens import ControlTokens
from mmd_workers.model.inputs import PROCESSOR_ERRORS

SHOWN_BELOW = "[shown in the next message]"
"""What the model reads in the result of a tool in place of a medium that its template does not render there."""
_LOOKS = {"role": "assistant", "content": [{"type": "text", "text": "I look at it."}]}
_PROBED = ("mmd_probed_beginning", "mmd_probed_end")
_PROBED_IDS = ("1", "call_mmd-probed", "toolu_" + 58 * "0")
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")
_WRITTEN = frozenset({"content", "reasoning_content", "tool_calls", "tool_call_id", "name"})
"""Fields of a message with text by the user."""


class ChatTemplate:
    """The chat template of one model. Thread safe.

    Messages, tools and calls are in the shape of Hugging Face's chat templates.
    """

    def __init__(self, tokenizer: Any, processor: Any | None, adapter: Adapter) -> None:
        self._tokenizer = tokenizer
        self._processor = processor
        self._adapter = adapter
        self._control_tokens = ControlTokens(tokenizer.added_tokens_encoder)

    @property
    def sources(self) -> list[str]:
        """The text of each template: a model may have several, for tools or for retrieval."""
        templates = [getattr(owner, "chat_template", None) for owner in (self._processor, self._tokenizer)]
        return [
            source
            for template in templates
            for source in (template.values() if isinstance(template, dict) else [template])
            if isinstance(source, str)
        ]

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        begins_answer: bool = True,
    ) -> str:
        """Render a conversation to text, with one marker for each medium.

        A medium in the result of a tool belongs to the user's message after it, unless the template renders it in the result. Ids of
        calls and their arguments become what the template takes. `begins_answer`: the text ends with the beginning of an answer.

        Raises:
            UnsupportedInputError: the template refuses it, as many refuse roles that do not alternate.
        """
        rendered = partial(self._rendered, tools=tools, variables=variables, begins_answer=begins_answer)
        if any("tool_calls" in message for message in messages):
            messages = self._with_calls_as_it_takes_them(messages)
        if not any(message["role"] == "tool" and _has_media(message) for message in messages):
            return rendered(messages)
        kept = self._rendered_in_results
        try:
            return rendered(_with_media_after_results(messages, kept))
        except UnsupportedInputError:  # some templates take no message of a user right after a result
            return rendered(_with_media_after_results(messages, kept, [_LOOKS]))

    def render_to_continue(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
    ) -> str:
        """Render a conversation up to the end of its last message's text, so that the model continues that message.

        Raises:
            UnsupportedInputError: the template refuses it, or does not render that text as it is.
        """
        *before, last = messages
        *parts, part = _parts_of(last)
        marked = {**last, "content": [*parts, {**part, "text": part["text"] + _PROBED[1]}]}
        text, end, _ = self.render([*before, marked], tools, variables, begins_answer=False).rpartition(
            _PROBED[1]
        )
        if not end:
            raise UnsupportedInputError(
                "continue_final_message: this model's chat template does not render the content of the last message; omit it, or use "
                "/v1/completions to continue a text"
            )
        return text

    def _rendered(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        begins_answer: bool = True,
    ) -> str:
        try:
            if self._processor is not None:
                return self._adapter.render(
                    self._processor, _as_parts(messages), tools, begins_answer=begins_answer, **variables
                )
            return str(
                self._tokenizer.apply_chat_template(
                    _as_text(messages),
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=begins_answer,
                    **variables,
                )
            )
        except (TemplateError, *PROCESSOR_ERRORS) as error:
            raise UnsupportedInputError(
                f"messages: this model's chat template cannot render them: {str(error)[:300]}; change their roles, order or content"
            ) from error

    def _with_calls_as_it_takes_them(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        if self._shows_ids_alone:
            messages = _with_named_ids(messages)
        elif not self._takes_any_id:
            messages = [_with_short_ids(message) for message in messages]
        if self._takes_texts_alone:
            return [_with_arguments(message, _as_text_arguments) for message in messages]
        if any(map(_has_broken_arguments, messages)) and not self._takes_broken_arguments:
            return [_with_arguments(message, _as_object) for message in messages]
        return messages

    @functools.cached_property
    def _shows_ids_alone(self) -> bool:
        """True if the template writes the id of a call in place of its name, as that of Kimi K2 does."""
        name = call_forms.probed_tool()["function"]["name"]
        before = self._probed(call_forms.probed_call()[:1])
        shown = [
            call_forms.shows_name(self._probed(call_forms.probed_call(call_id)), before)
            for call_id in ("mmdprobed", call_forms.named_id(name, 0))
        ]
        return shown == [False, True]

    @functools.cached_property
    def _takes_texts_alone(self) -> bool:
        """True if the template writes arguments as they come, so that they must be JSON already, as that of DeepSeek-V3 does."""
        conversation = call_forms.probed_call()
        objects = self._probed(conversation)
        texts = self._probed([_with_arguments(message, _as_text_arguments) for message in conversation])
        before = self._probed(conversation[:1])
        return call_forms.renders_call(texts, before) and not (
            call_forms.renders_call(objects, before) and call_forms.is_json(objects)
        )

    def _probed(self, conversation: Sequence[dict[str, Any]]) -> str:
        """The text of a conversation with a call, or "" if the template refuses it."""
        try:
            return self._rendered(conversation, [call_forms.probed_tool()])
        except UnsupportedInputError:
            return ""

    @functools.cached_property
    def _takes_any_id(self) -> bool:
        """False if the template refuses ids of calls but those of nine letters and digits, as templates of Mistral do."""
        if not self._probed(call_forms.probed_call()):
            return True  # it refuses something else
        return all(self._probed(call_forms.probed_call(call_id)) for call_id in _PROBED_IDS)

    @functools.cached_property
    def _takes_broken_arguments(self) -> bool:
        """False if the template refuses or leaves out arguments that are a text, as those do that write each argument on its own."""
        broken = [_with_arguments(message, lambda _: _PROBED[0]) for message in call_forms.probed_call()]
        return _PROBED[0] in self._probed(broken)

    @functools.cached_property
    def _rendered_in_results(self) -> frozenset[str]:
        """The modalities that the template renders in the result of a tool as it does in a question."""
        return frozenset(filter(self._renders_in_results, MODALITIES))

    def _renders_in_results(self, modality: str) -> bool:
        first, last = ({"type": "text", "text": text} for text in _PROBED)
        content = [first, {"type": modality}, last]
        *before, result = call_forms.probed_call()
        try:
            question = self._rendered([{"role": "user", "content": content}])
            answer = self._rendered([*before, {**result, "content": content}])
        except UnsupportedInputError:
            return False
        begin, end = question.find(_PROBED[0]), question.find(_PROBED[1])
        shown = question[begin : end + len(_PROBED[1])]
        return len(shown) > len("".join(_PROBED)) and shown in answer

    def render_if_possible(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The text of `render`, or "" if the template refuses the conversation."""
        try:
            return self.render(messages, tools, variables)
        except UnsupportedInputError:
            return ""

    def mention_control_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> bool:
        """Whether users wrote a control token into these messages or tools."""
        return any(
            self._control_tokens.appear_in(text)
            for message in messages
            for key in _WRITTEN & message.keys()
            for text in _written(message[key])
        ) or any(map(self._control_tokens.appear_in, _written(list(tools), keys=True)))

    def mark(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Mark control tokens that users wrote, so that they are neither replaced nor encoded as such."""
        return [
            {**message, **{key: self.marked(message[key]) for key in _WRITTEN & message.keys()}}
            for message in messages
        ]

    def marked(self, value: Any, *, keys: bool = False) -> Any:
        """`value` with its control tokens marked. `keys`: also in the names of fields, which the user chose."""
        if isinstance(value, dict):
            return {
                (self.marked(name) if keys else name): (
                    field
                    if name == "type" and not keys
                    else self.marked(field, keys=keys or name == "arguments")
                )
                for name, field in value.items()
            }
        if isinstance(value, list):
            return [self.marked(item, keys=keys) for item in value]
        return self._control_tokens.marked(value) if isinstance(value, str) else value


def _written(value: Any, *, keys: bool = False) -> Iterator[str]:
    """Every text by the user in these fields of a message. `keys`: names of fields are by the user, too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, field in value.items():
            if keys:
                yield name
            if keys or name != "type":
                yield from _written(field, keys=keys or name == "arguments")
    elif isinstance(value, list):
        for item in value:
            yield from _written(item, keys=keys)


def _with_media_after_results(
    messages: Sequence[dict[str, Any]], kept: AbstractSet[str], between: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Move the media of tool results to the user's message after the results.

    The media of one modality stay in their order. `kept`: modalities that stay in the results. `between`: messages that go before a message that has to be added.
    """
    placed: list[dict[str, Any]] = []
    moved: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            content = []
            for part in _parts_of(message):
                is_moved = part["type"] in MODALITIES and part["type"] not in kept
                moved += [part] if is_moved else []
                content.append({"type": "text", "text": SHOWN_BELOW} if is_moved else part)
            message = {**message, "content": content}
        elif moved and message["role"] == "user":
            message, moved = {**message, "content": [*moved, *_parts_of(message)]}, []
        elif moved:
            placed += [*between, {"role": "user", "content": moved}]
            moved = []
        placed.append(message)
    return [*placed, *between, {"role": "user", "content": moved}] if moved else placed


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls and results have ids of nine letters and digits, the same for the same id."""
    if calls := message.get("tool_calls"):
        message = {**message, "tool_calls": [{**call, "id": _short_id(call["id"])} for call in calls]}
    if "tool_call_id" in message:
        message = {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    return message


def _short_id(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _has_broken_arguments(message: dict[str, Any]) -> bool:
    return any(isinstance(call["function"]["arguments"], str) for call in message.get("tool_calls") or ())


def _with_arguments(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A message with the arguments of its calls changed."""
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    changed = [{**function, "arguments": change(function["arguments"])} for function in functions]
    calls = zip(message["tool_calls"], changed, strict=True)
    return {**message, "tool_calls": [{**call, "function": function} for call, function in calls]}


def _as_text_arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    """Arguments that are a text, since the model wrote no JSON, as the only value of an object."""
    return {call_forms.INVALID_JSON: arguments} if isinstance(arguments, str) else arguments


def _with_named_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation whose ids of calls have their names and their numbers in it."""
    named, number, ids = [], 0, dict[str, str]()
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            ids[call["id"]] = call_forms.named_id(call["function"]["name"], number)
            calls.append({**call, "id": ids[call["id"]]})
            number += 1
        if calls:
            message = {**message, "tool_calls": calls}
        if "tool_call_id" in message:
            call_id = message["tool_call_id"]
            message = {**message, "tool_call_id": ids.get(call_id, call_id)}
        named.append(message)
    return named


def _has_media(message: dict[str, Any]) -> bool:
    return any(part["type"] in MODALITIES for part in _parts_of(message))


def _parts_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _as_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Content as a list of parts, and results of tools that are text as text, as templates of multimodal models read them.

    A part keeps only its type and its text, or its reasoning.
    """
    normal = []
    for message in messages:
        parts = [
            {k: v for k, v in part.items() if k in ("type", "text", "thinking")}
            for part in _parts_of(message)
        ]
        if message["role"] == "tool" and all(part["type"] == "text" for part in parts):
            normal.extend(_as_text([message]))
        else:
            normal.append({**message, "content": parts})
    return normal


def _as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Content as one string, as templates of text models read it; parts stay if one of them is the reasoning.

    Parts are lines, as on vLLM's server. Those of an answer are what the model wrote in one piece.
    """
    normal = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and not any("thinking" in part for part in content):
            between = "" if message["role"] == "assistant" else "\n"
            content = between.join(filter(None, (part.get("text") for part in content)))
        normal.append({**message, "content": content or ""})
    return normal
