"""One module for each command: its options, and how its result is printed."""
