"""How many replicas a pool needs, decided from numbers and the time that are passed in."""
