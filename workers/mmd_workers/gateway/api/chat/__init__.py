"""OpenAI's chat completions: what clients get. Their requests, which the other APIs are translated to, are in `content`."""
