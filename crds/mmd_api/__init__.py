"""The MultimodalDeployment resource: its models, rules, schema and file format. Independent of the operator and workers."""
