"""Everything that crosses a process: what processes of a deployment may send each other, and under which
names.

`pools` names pools, roles and modalities; `load` is what pods report about themselves; `paths` are the HTTP
paths of pods; `errors` is the one table of errors; `subjects` are the NATS subjects and who may use them;
`version` is the version of messages and tensors; `metric_table` declares metrics. Operator, gateway, workers,
simulator and command line use exactly these. Independent of the resource and of the cluster.
"""
