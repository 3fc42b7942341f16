"""Everything that runs, or speaks to, a pipeline on this machine."""
