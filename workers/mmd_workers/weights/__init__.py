"""Downloads of weights to a cache that pods start from: see `download`."""
