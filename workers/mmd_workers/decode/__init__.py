"""The decode role: KV in, tokens out."""
