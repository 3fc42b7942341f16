"""vLLM as the engine of a pod's sequences. Imported only where `spec.engine.type` is VLLM: vLLM has an environment of its own."""
