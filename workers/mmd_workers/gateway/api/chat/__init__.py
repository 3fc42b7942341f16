"""OpenAI's chat completions: the responses to clients. Chat requests, which other APIs' requests are translated to, are in `content`."""
