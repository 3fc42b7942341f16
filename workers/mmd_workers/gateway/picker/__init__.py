"""The endpoint picker, which proxies of the Gateway API ask for a gateway: a process of its own, and the gateway's side of it.

Knows no request beyond its headers.
"""
