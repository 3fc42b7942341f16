"""Oracles of right answers: small models of every architecture with random weights, and transformers' own
`generate`.
"""
