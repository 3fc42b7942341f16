"""Writes conversations as text by the model's chat template. Independent of media, whose markers it only places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError

from mmd_api.contract.errors import UnsupportedInputError
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.control_tokens import ControlTokens
from mmd_workers.model.inputs import PROCESSOR_ERRORS

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
    ) -> str:
        """Render a conversation to text, with one marker for each medium.

        Raises:
            UnsupportedInputError: the template refuses it, as many refuse roles that do not alternate.
        """
        try:
            if self._processor is not None:
                return self._adapter.render(self._processor, _as_parts(messages), tools, **variables)
            return str(
                self._tokenizer.apply_chat_template(
                    _as_text(messages),
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=True,
                    **variables,
                )
            )
        except (TemplateError, *PROCESSOR_ERRORS) as error:
            raise UnsupportedInputError(
                f"messages: this model's chat template cannot render them: {str(error)[:300]}; change their roles, order or content"
            ) from error

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


def _as_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Content as a list of parts, and results of tools as text, as templates of multimodal models read them.

    A part keeps only its type and its text, or its reasoning.
    """
    normal = []
    for message in messages:
        content = message.get("content")
        if message["role"] == "tool":
            normal.extend(_as_text([message]))
            continue
        if isinstance(content, list):
            parts = [{k: v for k, v in part.items() if k in ("type", "text", "thinking")} for part in content]
        else:
            parts = [{"type": "text", "text": content or ""}]
        normal.append({**message, "content": parts})
    return normal


def _as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Content as one string, as templates of text models read it; parts stay if one of them is the reasoning."""
    normal = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and not any("thinking" in part for part in content):
            content = "".join(part.get("text", "") for part in content)
        normal.append({**message, "content": content or ""})
    return normal
