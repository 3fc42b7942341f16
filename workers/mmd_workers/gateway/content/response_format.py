"""The form of an answer: OpenAI's `response_format` and vLLM's `structured_outputs`, as the grammar that workers follow."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import OrderedDict
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from mmd_api.contract.answers import MAX_GRAMMAR_CHARACTERS, Grammar
from mmd_api.contract.errors import GrammarFailedError, InvalidValueError, UnsupportedParameterError
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.strict import Strict
from mmd_workers.gateway.output.grammar_trial import TooCostlyError, try_out
from mmd_workers.model.grammar import LENIENT, SCHEMA_OPTIONS, Grammars

MAX_SCHEMA_CHARACTERS = MAX_GRAMMAR_CHARACTERS - 64  # room for options
MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 4096
MAX_CHOICES_CHARACTERS = 32_768  # characters of all choices, escapes included
MAX_INTEGER = 2**53
MAX_REFUSED = 256  # refused grammars that are remembered
OBJECT = '{"type":"object"}'


def as_json(schema: dict[str, Any]) -> str:
    """The schema as JSON. A parsed schema would take ten times the memory for as long as the request lasts."""
    schema = {name: value for name, value in schema.items() if name != SCHEMA_OPTIONS}
    source = json.dumps(schema, separators=(",", ":"))
    if len(source) > MAX_SCHEMA_CHARACTERS:
        raise PydanticCustomError(
            "too_long", f"the schema has more than {MAX_SCHEMA_CHARACTERS} characters as JSON; shorten it"
        )
    return source


def lenient(source: str) -> str:
    """The schema, without its keywords that cannot be enforced."""
    return json.dumps({**json.loads(source), SCHEMA_OPTIONS: LENIENT}, separators=(",", ":"))


def exact_integers(source: str) -> str:
    """The schema, if the library keeps all of its integers.

    Raises:
        PydanticCustomError: an integer is too large.
    """
    json.loads(source, parse_int=_exact)
    return source


def _exact(digits: str) -> int:
    """Refuse an integer that the library would change: it reads integers as floating-point numbers."""
    if abs(number := int(digits)) > MAX_INTEGER:
        raise PydanticCustomError(
            "too_large", f"the schema has an integer beyond ±{MAX_INTEGER}; use a smaller one, or a string"
        )
    return number


JsonSource = Annotated[dict[str, Any], AfterValidator(as_json), AfterValidator(exact_integers)]
SchemaName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Source = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class JsonSchemaFormat(Strict):
    """A named schema. Every answer matches it. `strict`: a keyword that cannot be enforced is an error. Name and description have no effect."""

    name: SchemaName
    description: str | None = None
    source: JsonSource = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "no_schema", "type json_schema requires json_schema, and no other type has it"
            )
        return self

    def grammar(self) -> tuple[Grammar, str] | None:
        """The grammar of the answer, and the field that sets it; None for text."""
        if self.type == "text":
            return None
        if self.json_schema is None:
            return Grammar("json_schema", OBJECT), "response_format"
        source: Any = self.json_schema.source
        form = Grammar("json_schema", source if self.json_schema.strict else lenient(source))
        return form, "response_format.json_schema.schema"


class StructuredOutputs(Strict):
    """As vLLM has it, but for grammars, which may cost more with each token: one of a schema, a regular expression, and choices."""

    source: JsonSource | None = Field(None, alias="json")
    regex: Source | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_CHARACTERS)]],
            Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if sum(value is not None for value in (self.source, self.regex, self.choice)) != 1:
            raise PydanticCustomError("not_one", "set exactly one of json, regex and choice")
        return self

    def as_grammar(self) -> tuple[Grammar, str]:
        """The grammar of the answer, and the field that sets it."""
        if self.source is not None:
            source: Any = self.source
            return Grammar("json_schema", source), "structured_outputs.json"
        if self.regex is not None:
            return Grammar("regex", self.regex), "structured_outputs.regex"
        alternatives = "|".join(map(re.escape, self.choice or ()))
        if len(alternatives) > MAX_CHOICES_CHARACTERS:
            too_long = InvalidValueError(
                f"structured_outputs.choice: the choices have more than {MAX_CHOICES_CHARACTERS} characters; send fewer"
            )
            raise ApiError(too_long, param="structured_outputs.choice")
        return Grammar("regex", alternatives), "structured_outputs.choice"


class GrammarCheck:
    """Accepts only grammars that the workers can follow: compiles them as workers do, and follows them to their first tokens.

    A new grammar is first compiled where it can do no harm. A recently refused one is refused at once.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._refused: OrderedDict[bytes, str] = OrderedDict()  # reason by digest, the newest last
        self._place = asyncio.Lock()  # each compilation takes a core

    async def check(self, grammar: Grammar, param: str) -> None:
        """Compile a grammar on other threads and processes, one at a time; a known grammar does not wait.

        Raises:
            ApiError: it cannot be compiled, costs too much, or this model has no tokenizer for it; names the field.
        """
        digest = hashlib.sha256(f"{grammar.type} {grammar.source}".encode("utf-8", "surrogatepass")).digest()
        try:
            if not self._is_known(grammar, digest):
                await self._compile(grammar, digest)
        except GrammarFailedError as error:
            raise ApiError(InvalidValueError(f"{param}: {error.message}"), param=param) from error
        except UnsupportedParameterError as error:
            unsupported = UnsupportedParameterError(f"{param}: {error.message}; omit it")
            raise ApiError(unsupported, param=param) from error

    def _is_known(self, grammar: Grammar, digest: bytes) -> bool:
        """True if the grammar is compiled already. Raises GrammarFailedError if it has been refused."""
        if (reason := self._refused.get(digest)) is not None:
            self._refused.move_to_end(digest)
            raise GrammarFailedError(reason)
        return grammar in self._grammars

    async def _compile(self, grammar: Grammar, digest: bytes) -> None:
        await self._place.acquire()
        compiling: asyncio.Task[object] | None = None
        try:
            if self._is_known(grammar, digest):  # another request may have compiled it meanwhile
                return
            await try_out(grammar)
            compiling = asyncio.create_task(self._compile_here(grammar, digest))
        except TooCostlyError as error:
            raise self._refuse(digest, f"takes too much to compile ({error.message}); simplify it") from error
        except GrammarFailedError as error:
            raise self._refuse(digest, _cannot(error)) from error
        finally:
            if compiling is None:
                self._place.release()
        # The thread continues if the request is cancelled, and keeps the lock until it has ended.
        compiling.add_done_callback(lambda _: self._place.release())
        await asyncio.shield(compiling)

    async def _compile_here(self, grammar: Grammar, digest: bytes) -> None:
        try:
            await self._grammars.begin_aside(grammar)
        except GrammarFailedError as error:
            raise self._refuse(digest, _cannot(error)) from error

    def _refuse(self, digest: bytes, reason: str) -> GrammarFailedError:
        self._refused[digest] = reason
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        return GrammarFailedError(reason)


_NOT_ENFORCED = re.compile(
    r"Unimplemented keys: \[(?P<keys>.*)\]|Unknown (?P<format>format): .*|(?P<one>oneOf) constraints.*"
)


def _cannot(error: GrammarFailedError) -> str:
    if match := _NOT_ENFORCED.fullmatch(error.message):
        keywords = (match["keys"] or match["format"] or match["one"]).replace('"', "")
        return (
            f"cannot be enforced: {error.message}; remove {keywords}, or send the schema in response_format or in tools without strict, where "
            "such keywords are annotations"
        )
    return f"cannot be compiled: {error.message}; change or simplify it"
