"""Memory for KV: blocks and their holders, the pool's tensors, room for a sequence. Knows no scheduling and no model."""
