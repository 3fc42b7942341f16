"""The data plane: messages, NATS, transfers of features and media. Independent of the model."""
