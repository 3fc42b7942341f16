"""The identities of a request's blocks, as engines, decoders and routers know them. Independent of any engine."""

from __future__ import annotations

from collections.abc import Sequence

from mmd_workers.engine.memory.blocks import completed_identities, prompt_root, root_of
from mmd_workers.features.references import media_spans
from mmd_workers.wire.messages.prefill import GenerateRequest


def prefix_of(
    request: GenerateRequest,
    block_tokens: int,
    *,
    bidirectional_prompt: bool = False,
    output_token_ids: Sequence[int] | None = None,
    leading: Sequence[bytes] = (),
) -> list[bytes]:
    """Identities of the whole blocks of the request's prompt and output.

    `bidirectional_prompt`: all tokens of a prompt see one another. `output_token_ids`: the output, if there is more than the request has.
    `leading`: identities of the first blocks, where another pod has hashed them.
    """
    outputs = request.output_token_ids if output_token_ids is None else output_token_ids
    spans = media_spans(request.features)
    root = root_of(request.adapter, request.cache_salt)
    root = prompt_root(root, request.token_ids, spans, bidirectional=bidirectional_prompt)
    return completed_identities(leading, [*request.token_ids, *outputs], spans, block_tokens, root)
