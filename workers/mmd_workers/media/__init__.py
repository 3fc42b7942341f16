"""Media from outside: measured, fetched, decoded in a sandbox. Knows no model and no bus."""
