"""From a validated request to an exact prompt: media fetched, probed and held, placeholders laid out, limits of prompts and media checked.

`Gateway.admit` checks the limits of tenants. Knows no HTTP, and places nothing.
"""
