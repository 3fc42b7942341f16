"""Rollouts: a pure decision on the next step from the present objects to the desired ones, and its execution. Independent of load."""
