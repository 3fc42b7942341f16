"""Features between the encode and the prefill role: their terms, bytes, cache, store and sources."""
