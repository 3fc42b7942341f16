"""Common to every process of a pod: its settings, its identity, its parts from start to end, and its group of pods.

Knows no role: `worker` joins these with the roles.
"""
