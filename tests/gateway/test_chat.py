"""The official client against a gateway on real NATS, with workers that do as scripted."""

from __future__ import annotations

from .conftest import Launch

HELLO = [{"role": "user", "content": "hello"}]
MODEL = "builtin/demo"


async def test_a_text_request_is_answered_in_one_piece(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    answer = await gateway.openai.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
    assert answer.choices[0].message.content == "the red circle"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(worker.answer)
    assert answer.usage.prompt_tokens == len(worker.requests[0].token_ids)
    assert worker.requests[0].decode_pods == []


async def test_a_streamed_answer_comes_in_pieces_that_join_to_the_text(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker("the red circle")
    stream = await gateway.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == "the red circle"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
