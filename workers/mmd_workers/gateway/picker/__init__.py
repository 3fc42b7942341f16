"""The endpoint picker, a separate process for proxies of the Gateway API, and the gateway's side of it.

The picker chooses a gateway pod for each request. It knows no request beyond its headers.
"""
