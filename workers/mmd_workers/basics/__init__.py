"""Small tools that any part may use: clocks, pauses, devices, memory, logs. Knows nothing of requests, models or messages."""
