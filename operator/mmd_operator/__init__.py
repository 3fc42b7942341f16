"""The Kubernetes operator: turns a MultimodalDeployment into objects in a cluster. It never imports the workers.

A change passes through `handlers` (which deployment to wake), `passes` (the list of what a pass does), `observed` (the present state),
`resources` (the desired objects), `rollout` (the next step and its execution) and `status` (what is reported). `scaling` sizes pools by load
with the pure `autoscaling`, `sizes` divides GPUs, and `kube` talks to the API server. Each package imports only packages listed after it in
the import contract of `pyproject.toml`.
"""
