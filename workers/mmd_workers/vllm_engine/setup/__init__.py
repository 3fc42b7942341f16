"""Makes vLLM's engine core from the spec: arguments, environment, weights, adapters."""
