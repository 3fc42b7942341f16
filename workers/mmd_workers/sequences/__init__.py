"""What prefill and decode share: the engine of a pod, the sequences that it runs, and the KV links with other pods."""
