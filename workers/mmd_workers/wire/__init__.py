"""Messages, NATS, and transfers of features and media. Independent of the model."""
