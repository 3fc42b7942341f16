"""Who may use the gateway, and how much: API keys, tokens of an issuer, tenants' limits, the certificate. Knows no request."""
