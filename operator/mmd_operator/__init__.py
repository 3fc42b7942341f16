"""The operator: from a MultimodalDeployment to objects in a cluster. Never imports the workers.

A change passes through `handlers` (which deployment to wake), `passes` (what a pass does, as a list), `observed` (what there is), `resources` (what
there should be), `rollout` (the next step, and carrying it out), `status` (what is reported). `scaling` decides sizes by load with the pure
`autoscaling`; `sizes` divides GPUs; `kube` is the API server. Each imports only those listed after it in the import contract of
`pyproject.toml`.
"""
