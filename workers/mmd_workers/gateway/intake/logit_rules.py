"""A request's changes of the model's logits, checked, and in the terms of the pods that apply them. Independent of the network."""

from __future__ import annotations

from collections.abc import Sequence

from mmd_api.contract.errors import InvalidValueError, UnsupportedParameterError
from mmd_api.contract.sampling import LogitRules
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.content.chat_request import GenerationRequest
from mmd_workers.model.interfaces import Frontend

MAX_BAD_WORD_TOKENS = 1024  # tokens of all words together


def check_token_ids(request: GenerationRequest, vocab_size: int) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        ApiError: names the field.
    """
    fields = (
        ("logit_bias", request.logit_bias),
        ("allowed_token_ids", request.allowed_token_ids),
        ("stop_token_ids", request.stop_token_ids),
    )
    for name, token_ids in fields:
        if token_ids and (largest := max(token_ids)) >= vocab_size:
            unknown = InvalidValueError(
                f"{name} has token {largest}, but the model's {vocab_size} tokens have ids from 0 to {vocab_size - 1}; remove it"
            )
            raise ApiError(unknown, param=name)


def bad_words(words: Sequence[str], frontend: Frontend) -> list[list[int]]:
    """The token sequences that spell these words, each once. Takes milliseconds.

    Raises:
        ApiError: names the word that has no token, or the field if there are too many.
    """
    distinct: dict[tuple[int, ...], None] = {}
    for number, word in enumerate(words):
        sequences = frontend.sequences_of(word)
        if not sequences:
            blank = InvalidValueError(
                f"bad_words[{number}] has no tokens; use a word that is more than spaces"
            )
            raise ApiError(blank, param=f"bad_words[{number}]")
        distinct |= dict.fromkeys(map(tuple, sequences))
    if (tokens := sum(map(len, distinct))) > MAX_BAD_WORD_TOKENS:
        many = InvalidValueError(
            f"bad_words have {tokens} tokens, more than the limit of {MAX_BAD_WORD_TOKENS}; send fewer or shorter words"
        )
        raise ApiError(many, param="bad_words")
    return [list(sequence) for sequence in distinct]


def logit_rules(request: GenerationRequest, words: list[list[int]]) -> LogitRules | None:
    """The request's rules, with its bad words as tokens; None if it has none."""
    rules = LogitRules(
        allowed_token_ids=sorted(set(request.allowed_token_ids or ())),
        bad_words=words,
        logit_bias=sorted((request.logit_bias or {}).items()),
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
    )
    return None if rules == LogitRules() else rules


def check_something_is_left(request: GenerationRequest, rules: LogitRules | None, frontend: Frontend) -> None:
    """Refuse rules that could exclude every token at some step, so that the model could not continue.

    Raises:
        ApiError: names the field.
    """
    if rules is None and not request.min_tokens:
        return
    excluded = {*frontend.placeholder_ids, *(word[-1] for word in (rules.bad_words if rules else ()))}
    if request.min_tokens:
        excluded |= {*(request.stop_token_ids or ()), *(() if request.ignore_eos else frontend.eos_token_ids)}
    allowed = (rules.allowed_token_ids if rules else None) or range(frontend.vocab_size)
    if all(token in excluded for token in allowed):
        nothing = InvalidValueError(
            "allowed_token_ids has no token that can always be sampled: placeholders of media, the last tokens of bad_words and, before "
            "min_tokens, those that end the answer are excluded; allow another token"
        )
        raise ApiError(nothing, param="allowed_token_ids")


def check_works_with_drafts(request: GenerationRequest) -> None:
    """Refuse parameters that vLLM does not apply to drafts, or would apply to the wrong tokens after a request has moved.

    Raises:
        ApiError: names the field.
    """
    changed: dict[str, object] = {
        "min_p": request.min_p,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "repetition_penalty": (request.repetition_penalty or 1.0) != 1.0,
        "logit_bias": request.logit_bias,
        "allowed_token_ids": request.allowed_token_ids,
        "bad_words": request.bad_words,
    }
    if (form := request.grammar()) is not None:
        changed[form[1].split(".")[0]] = True
    if (field := request.calls_field) is not None:
        changed[field] = True
    for name, value in changed.items():
        if value:
            unsupported = UnsupportedParameterError(
                f"{name} is not supported with speculative decoding; omit it, or remove spec.engine.decode.speculative"
            )
            raise ApiError(unsupported, param=name)
