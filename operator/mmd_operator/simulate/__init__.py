"""Discrete-event model of the pipeline under the real autoscaler's code: the effect of a policy on a trace, and its cost."""
