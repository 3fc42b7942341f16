"""The prefill role: prompts in, KV out."""
