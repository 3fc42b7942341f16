"""Runs a pod's sequences with vLLM. Imported only where `spec.engine.type` is VLLM: vLLM has an environment of its own."""
