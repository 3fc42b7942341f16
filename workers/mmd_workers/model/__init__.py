"""A model by role. Import from `mmd_workers.model.frontend`, `.encoder` or `.language`: each loads only its own part."""
