"""From a validated request to an exact prompt: media fetched, probed and held, files, placeholders, limits. Knows no HTTP, and places nothing."""
