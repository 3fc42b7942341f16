"""Continuous batching over a block-paged KV pool: sequences in, tokens out. Independent of the network."""
