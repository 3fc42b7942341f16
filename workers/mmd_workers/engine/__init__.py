"""Continuous batching over a block-paged KV pool: sequences in, tokens out. Knows no network."""
