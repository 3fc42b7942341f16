"""One file for each command that a person types: its options, and how its result is printed."""
