"""Log probabilities of the tokens of prompts. vLLM computes the logits of a whole chunk for them, for which it has measured no memory; here it
computes those of a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors


def of_prompts(
    runner: Any, hidden: torch.Tensor, scheduled: Mapping[str, int]
) -> dict[str, LogprobsTensors | None]:
    """As vLLM's `_get_prompt_logprobs_dict`, in whose place `runner` calls it: of the requests whose prompts end with this step. `hidden`:
    [rows, width] of the step; `scheduled`: the rows of each request. Placeholders count, which are never sampled: prompts have them."""
    model, ended = runner.get_model(), dict[str, LogprobsTensors | None]()
    for name, likeliest in runner.num_prompt_logprobs.items():
        if name not in scheduled:
            continue
        request = runner.requests[name]
        prompt, begin = request.prompt_token_ids, request.num_computed_tokens
        last = len(prompt) - 1
        end = min(begin + scheduled[name], last)
        found = request.in_progress_prompt_logprobs_cpu
        if found is None:
            found = LogprobsTensors.empty_cpu(last, likeliest + 1)
            request.in_progress_prompt_logprobs_cpu = found
        first = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
        for start in range(begin, end, runner.max_num_reqs):
            stop = min(start + runner.max_num_reqs, end)
            rows = hidden[first + start - begin : first + stop - begin]
            values = runner.sampler.compute_logprobs(type(model).compute_logits(model, rows))
            tokens = torch.tensor(prompt[start + 1 : stop + 1], dtype=torch.int64, device=hidden.device)
            some = runner.sampler.gather_logprobs(values, likeliest, tokens)
            found.logprob_token_ids[start:stop] = some.logprob_token_ids.cpu()
            found.logprobs[start:stop] = some.logprobs.cpu()
        if begin + scheduled[name] > last:
            ended[name] = found
    for name in ended:
        del runner.num_prompt_logprobs[name]
        runner.requests[name].in_progress_prompt_logprobs_cpu = None
    return ended
