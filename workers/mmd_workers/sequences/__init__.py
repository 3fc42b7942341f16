"""The parts that prefill and decode share: a pod's engine, its sequences, and its KV links with other pods."""
