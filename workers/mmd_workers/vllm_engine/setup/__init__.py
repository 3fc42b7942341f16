"""What the spec means for vLLM, until its engine core is there: arguments, environment, weights, adapters."""
