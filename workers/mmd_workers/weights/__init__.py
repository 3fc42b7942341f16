"""Downloads weights to the cache that pods start from; see `download`."""
