"""Media from clients: fetched, measured, and decoded in a sandbox. Independent of the model and the message bus."""
