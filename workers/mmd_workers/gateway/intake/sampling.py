"""How the tokens of an answer are drawn: logit rules, grammar, the form of tool calls and reasoning, and limits. Independent of media and of workers."""

from __future__ import annotations

import asyncio
import secrets

from mmd_api.contract.answers import Grammar
from mmd_api.contract.errors import (
    ContextLengthError,
    InvalidValueError,
    MmdError,
    UnsupportedInputError,
    UnsupportedParameterError,
)
from mmd_api.contract.sampling import Guidance, LogitRules
from mmd_api.pipeline import PipelineConfig
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.content.chat_request import ChatRequest, GenerationRequest
from mmd_workers.gateway.content.response_format import GrammarCheck
from mmd_workers.gateway.content.tools import ToolUse
from mmd_workers.gateway.intake.checks import SHORTEN
from mmd_workers.gateway.intake.logit_rules import (
    bad_words,
    check_something_is_left,
    check_token_ids,
    check_works_with_drafts,
    logit_rules,
)
from mmd_workers.gateway.output.reasoning_grammar import after_reasoning
from mmd_workers.model.call_forms import FORMS, Spelling
from mmd_workers.model.interfaces import Frontend
from mmd_workers.model.prompt import PromptLayout
from mmd_workers.model.reasoning import Begin, Reasoning
from mmd_workers.wire.messages.message_parts import Sampling

MAX_SEED = 2**63
WITH_DRAFTS = {"temperature", "top_p", "top_k"}  # recommended parameters that work with speculative decoding


class AnswerRules:
    """What the answers of one model may be: the rules of a request, and the forms that the model writes."""

    def __init__(self, pipeline: PipelineConfig, frontend: Frontend) -> None:
        self._is_native = pipeline.spec.engine.type == "Native"
        vllm = pipeline.spec.engine.decode
        self._drafts = vllm is not None and vllm.speculative is not None
        self._frontend = frontend
        self._grammars = GrammarCheck(frontend.grammars)

    def use_defaults(self, request: GenerationRequest) -> None:
        """Set the parameters that the checkpoint recommends, and the request leaves out."""
        for name, value in self._frontend.sampling_defaults.items():
            if getattr(request, name) is None and (name in WITH_DRAFTS or not self._drafts):
                setattr(request, name, value)

    async def rules(self, request: GenerationRequest) -> LogitRules | None:
        """The request's changes of logits, checked against the vocabulary."""
        if request.is_guided and not self._is_native:
            unsupported = UnsupportedParameterError(
                "guidance_scale is not supported with spec.engine.type VLLM; omit it, or set spec.engine.type to Native"
            )
            raise ApiError(unsupported, param="guidance_scale")
        if self._drafts:
            check_works_with_drafts(request)
        check_token_ids(request, self._frontend.vocab_size)
        texts, words = request.bad_words, list[list[int]]()
        if texts:
            words = await asyncio.to_thread(bad_words, texts, self._frontend)
        rules = logit_rules(request, words)
        check_something_is_left(request, rules, self._frontend)
        return rules

    async def grammar(
        self, request: GenerationRequest, tools: ToolUse | None = None, spelling: Spelling | None = None
    ) -> Grammar | None:
        """The grammar of the answer, after compiling it here. `spelling`: of calls of `tools`."""
        grammar, param = request.grammar() or (None, "")
        if grammar is not None:
            await self._grammars.check(grammar, param)
        if tools is not None and spelling is not None:
            grammar = tools.grammar(spelling, grammar)
            if grammar is not None:
                await self._grammars.check(grammar, "tools")
        return grammar

    async def grammar_after_reasoning(
        self, grammar: Grammar, request: ChatRequest, reasoning: Reasoning, begins: Begin | None
    ) -> Grammar | None:
        """The grammar of the reasoning and the answer after it, after compiling it here.

        None if the answer begins at once: the prompt has closed the reasoning, the template has no reasoning, or a regular expression might
        match text that looks like reasoning.
        """
        _, param = request.grammar() or (None, "tools")
        is_exact = matches_exactly(request)
        if not reasoning.in_template or begins == "after" or (begins == "before" and is_exact):
            return None
        with_reasoning = after_reasoning(
            grammar, reasoning, param, inside=begins == "inside", gap=not is_exact
        )
        await self._grammars.check(with_reasoning, param)
        return with_reasoning

    async def reasoning(self) -> Reasoning | None:
        """The model's form of reasoning; None if unknown."""
        frontend = self._frontend
        return await asyncio.to_thread(lambda: frontend.reasoning)

    async def spelling(self) -> Spelling:
        """The model's form of tool calls.

        Raises:
            ApiError: the model was not made for tools, or writes calls in an unknown form.
        """
        frontend = self._frontend
        if not await asyncio.to_thread(lambda: frontend.renders_tools):
            unsupported = UnsupportedInputError(
                "tools: this model's chat template does not render tools; describe them in a system message and parse the answer, set "
                "tool_choice to 'none', or use another model"
            )
            raise ApiError(unsupported, param="tools")
        if (spelling := await asyncio.to_thread(lambda: frontend.call_spelling)) is None:
            unsupported = UnsupportedInputError(
                f"tools: this model's chat template writes calls in a form that is not known (known: {', '.join(FORMS)}); describe the tools in "
                "a system message and parse the answer, set tool_choice to 'none', or use another model"
            )
            raise ApiError(unsupported, param="tools")
        return spelling


def matches_exactly(request: ChatRequest) -> bool:
    """True if every character of the answer must match, white space and markers included: a regular expression or a choice."""
    grammar, _ = request.grammar() or (None, "")
    return grammar is not None and grammar.type == "regex"


def guidance_of(
    frontend: Frontend,
    request: GenerationRequest,
    layout: PromptLayout,
    limit: int,
    negative: list[int] | None,
) -> Guidance | None:
    """The companion of a prompt, with the `negative` tokens or, as in `generate`, the prompt's last token.

    Raises:
        ApiError: the companion's prompt is empty or too long.
    """
    if not request.is_guided:
        return None
    token_ids = layout.token_ids[-1:] if negative is None else negative
    fault: MmdError | None = None
    if not token_ids or not frontend.placeholder_ids.isdisjoint(token_ids):
        fault = InvalidValueError(
            "negative_prompt must be a text of at least one token, none of which stands for a medium; where it is omitted, the prompt's last "
            "token is used, which must not stand for a medium either"
        )
    elif len(token_ids) >= limit:
        fault = ContextLengthError(
            f"negative_prompt has {len(token_ids)} tokens, but at most {limit - 1} fit; {SHORTEN}"
        )
    if fault is not None:
        raise ApiError(fault, param="negative_prompt")
    assert request.guidance_scale is not None
    return Guidance(request.guidance_scale, token_ids)


def beside_companion(room: int, guidance: Guidance | None, limit: int) -> int:
    """Number of tokens that may be generated after a prompt and its companion's. `room`: without the companion."""
    return room if guidance is None else min(room, limit - len(guidance.token_ids))


def unasked_tokens(room: int, prompt_tokens: int, guidance: Guidance | None, limit: int) -> int:
    """Maximum tokens of an answer for which the client has set no limit.

    Every pod's KV pool holds one whole context, which a guided answer shares with its companion.
    """
    if guidance is None:
        return room
    return max(1, min(room, (limit - prompt_tokens - len(guidance.token_ids)) // 2))


def sampling_of(
    request: GenerationRequest,
    rules: LogitRules | None,
    grammar: Grammar | None,
    room: int,
    default_tokens: int,
) -> Sampling:
    """The sampling of a request. `room`: maximum tokens of the answer; `default_tokens`: their number if the request sets no limit.

    The seed is always set, so that a request that moves to another pod draws the same tokens.
    """
    max_tokens = min(request.asked_tokens or default_tokens, room)
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        seed=secrets.randbelow(MAX_SEED) if request.seed is None else request.seed % MAX_SEED,
        logprobs=request.num_computed_logprobs,
        ignore_eos=bool(request.ignore_eos),
        min_p=request.min_p or 0.0,
        min_tokens=min(request.min_tokens or 0, max_tokens),
        stop_token_ids=sorted(set(request.stop_token_ids or ())),
        rules=rules,
        grammar=grammar,
        prompt_logprobs=request.num_prompt_logprobs is not None,
    )
