"""The HTTP front door: validates, counts, routes, detokenises and streams. Loads no weights and decodes no media."""
