"""From tokens to parts of an answer, the memory that answers take, and the HTTP response that carries them. Knows the shape of no API."""
