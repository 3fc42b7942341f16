"""POST /v1/chat/completions, as OpenAI's API has it."""

from __future__ import annotations

from mmd_workers.gateway.answers.exchange import Exchange
from mmd_workers.gateway.api.chat.chat_shape import ChatShape
from mmd_workers.gateway.api.generation import Conversations
from mmd_workers.gateway.content.chat_request import ChatRequest, parse_chat_request
from mmd_workers.gateway.intake.prepared import Prepared


class ChatCompletions(Conversations[ChatRequest]):
    """POST /v1/chat/completions."""

    prefix = "chatcmpl-"

    def _parse(self, body: object) -> ChatRequest:
        return parse_chat_request(body)

    def _shape(self, _exchange: Exchange, request: ChatRequest, _prepared: Prepared) -> ChatShape:
        return ChatShape(
            logprobs=request.num_logprobs is not None,
            token_ids=bool(request.return_token_ids),
            usage=request.wants_usage,
            continuous=request.wants_continuous_usage,
            prompt_logprobs=request.prompt_logprobs,
        )
