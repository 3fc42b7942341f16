"""A discrete-event model of the pipeline under the real autoscaler's code: what a policy would have done with a trace, and at what cost."""
