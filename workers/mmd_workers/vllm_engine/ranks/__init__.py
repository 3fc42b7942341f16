"""A model that is split into ranks: their processes, their KV, and the pods of a group that they run in."""
