"""What every process of a pod is: its settings and identity, its parts from start to end, the group of pods that it may belong to.

Knows no role: `worker` joins these parts with the roles.
"""
