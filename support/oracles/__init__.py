"""What answers have to be: models of every architecture, small and with random weights, and transformers' own `generate`."""
