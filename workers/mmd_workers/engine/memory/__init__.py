"""Where KV is: blocks and who holds them, the tensors of the pool, room for a sequence. Knows no scheduling and no model."""
