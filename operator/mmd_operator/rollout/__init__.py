"""How a deployment gets from what exists to what is wanted: the next step, decided purely, and its execution. Knows no load."""
