"""From a validated request to an exact prompt: media fetched, probed and held, placeholders laid out, limits checked. Knows no HTTP, and places nothing."""
