"""The data plane: messages, NATS, transfers of features and media. Knows no model."""
