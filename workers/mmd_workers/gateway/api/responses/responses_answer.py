"""Responses of /v1/responses as pydantic models, for the OpenAPI document. `responses_shape` writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from mmd_workers.gateway.answers.usage import CompletionTokensDetails, PromptTokensDetails

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseTextPart(BaseModel):
    """Text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ResponseMessage(BaseModel):
    """What the model says."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[ResponseTextPart]


class ResponseReasoningPart(BaseModel):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ResponseReasoning(BaseModel):
    """The reasoning before an answer."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    content: list[ResponseReasoningPart]
    summary: list[Any]


class ResponseFunctionCall(BaseModel):
    """A call of a function. `namespace`: the group of the function, if it has one."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | None = Field(None, exclude_if=lambda group: group is None)


class ResponseCustomToolCall(BaseModel):
    """A call of a custom tool. `namespace`: the group of the tool, if it has one."""

    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | None = Field(None, exclude_if=lambda group: group is None)


ResponseItem = Annotated[
    ResponseMessage | ResponseReasoning | ResponseFunctionCall | ResponseCustomToolCall,
    Field(discriminator="type"),
]


class ResponseInputDetails(PromptTokensDetails):
    """Where the tokens of the input come from."""

    cache_write_tokens: int


class ResponseUsage(BaseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseFault(BaseModel):
    """Why a response failed."""

    code: str
    message: str
    param: str | None
    type: str
    retry_after_seconds: int | None = Field(None, exclude_if=lambda seconds: seconds is None)


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseForm(BaseModel):
    """The form of the text that was requested."""

    format: dict[str, Any]


class ResponseObject(BaseModel):
    """A response. `timings` (milliseconds by phase) only on request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[ResponseItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    text: ResponseForm
    metadata: dict[str, str]
    background: Literal[False]
    parallel_tool_calls: bool
    previous_response_id: None
    service_tier: Literal["default"]
    store: Literal[False]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: Literal["disabled"]
    timings: dict[str, float] | None = Field(None, exclude_if=lambda timings: timings is None)
