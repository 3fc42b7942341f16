"""Log probabilities of prompt tokens, computed from the logits of a few rows at a time.

vLLM would compute the logits of a whole chunk, for which it has measured no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors


def of_prompts(
    runner: Any, hidden: torch.Tensor, scheduled: Mapping[str, int]
) -> dict[str, LogprobsTensors | None]:
    """Return log probabilities of the prompts that end with this step. `runner` calls this instead of vLLM's
    `_get_prompt_logprobs_dict`.

    `hidden`: the step's hidden states [rows, width]. `scheduled`: rows of each request. Placeholders are not
    suppressed here, because prompts contain them.
    """
    model, ended = runner.get_model(), dict[str, LogprobsTensors | None]()
    for name, likeliest in runner.num_prompt_logprobs.items():
        if name not in scheduled:
            continue
        request = runner.requests[name]
        prompt, begin = request.prompt_token_ids, request.num_computed_tokens
        last = len(prompt) - 1
        end = min(begin + scheduled[name], last)
        prompt_logprobs = request.in_progress_prompt_logprobs_cpu
        if prompt_logprobs is None:
            prompt_logprobs = LogprobsTensors.empty_cpu(last, likeliest + 1)
            request.in_progress_prompt_logprobs_cpu = prompt_logprobs
        first = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
        for start in range(begin, end, runner.max_num_reqs):
            stop = min(start + runner.max_num_reqs, end)
            rows = hidden[first + start - begin : first + stop - begin]
            values = runner.sampler.compute_logprobs(type(model).compute_logits(model, rows))
            tokens = torch.tensor(prompt[start + 1 : stop + 1], dtype=torch.int64, device=hidden.device)
            chunk_logprobs = runner.sampler.gather_logprobs(values, likeliest, tokens)
            prompt_logprobs.logprob_token_ids[start:stop] = chunk_logprobs.logprob_token_ids.cpu()
            prompt_logprobs.logprobs[start:stop] = chunk_logprobs.logprobs.cpu()
        if begin + scheduled[name] > last:
            ended[name] = prompt_logprobs
    for name in ended:
        del runner.num_prompt_logprobs[name]
        runner.requests[name].in_progress_prompt_logprobs_cpu = None
    return ended
