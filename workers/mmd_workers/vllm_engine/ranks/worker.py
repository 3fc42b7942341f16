"""vLLM's worker for this device, which takes the masks of a step where vLLM hands over those of its own grammars, and computes the log
probabilities of prompts in the memory that there is."""

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
    """In the process that computes: the pod's, or a rank's."""

    def init_device(self) -> None:
        """Make what runs the model."""
        super().init_device()
        self.model_runner._get_prompt_logprobs_dict = partial(of_prompts, self.model_runner)

    def sample_tokens(self, grammar_output: StepMasks | None) -> Any:
        """Sample the step's tokens, of those that its masks allow. vLLM gets none: it would apply them before it computes log
        probabilities."""
        mask_next(self.model_runner.input_batch, grammar_output)
        return super().sample_tokens(None)
