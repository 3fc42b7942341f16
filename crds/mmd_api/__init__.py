"""The MultimodalDeployment resource: its models, rules, schema and file format. Knows neither operator nor workers."""
