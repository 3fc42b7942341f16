"""The data plane: gateway, encoder, prefill and decode workers, and the runner that starts them on one machine."""
