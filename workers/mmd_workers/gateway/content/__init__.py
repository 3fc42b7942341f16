"""Client requests as pydantic models: conversations, parts, tools, response formats. Knows neither the network nor the model."""
