"""Splits a model into ranks: their processes, their KV, and the pods of the group in which they run."""
