"""Media from outside: measured, fetched, decoded in a sandbox. Independent of the model and the message bus."""
