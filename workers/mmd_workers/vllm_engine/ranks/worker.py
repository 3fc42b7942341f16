"""vLLM's worker for this device, with our masks and prompt log probabilities.

It gets the masks of a step in place of those of vLLM's own grammars, and computes log probabilities of
prompts within the measured memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.platforms import current_platform

from mmd_workers.vllm_engine.prompts import of_prompts
from mmd_workers.vllm_engine.structured import StepMasks, mask_next

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as DeviceWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as DeviceWorker


class MaskedWorker(DeviceWorker):
    """vLLM's worker, in the process that computes: the pod's, or a rank's."""

    def init_device(self) -> None:
        """Initialize the device, and replace the model runner's log probabilities of prompts."""
        super().init_device()
        self.model_runner._get_prompt_logprobs_dict = partial(of_prompts, self.model_runner)

    def sample_tokens(self, grammar_output: StepMasks | None) -> Any:
        """Sample the step's tokens among those that its masks allow.

        vLLM itself gets no masks: it would apply them before it computes log probabilities.
        """
        mask_next(self.model_runner.input_batch, grammar_output)
        return super().sample_tokens(None)
