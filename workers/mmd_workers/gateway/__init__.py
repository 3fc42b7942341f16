"""The gateway: validates, counts, routes, detokenises and streams requests. Loads no weights and decodes no media.

A request passes through the rooms in this order: `api` (HTTP and the shape of each API), `idempotency` (repeats of a request), `content`
(what clients send), `intake` (from there to an exact prompt), `placement` (which pods take it, and when), `answers` (from tokens to parts of an
answer), and back to `api`. `output` has grammars and parsers of what models write: tools, reasoning, text, `access` keys and limits of
tenants, `picker` the endpoint picker, `basics` what all of them use, and `process` starts and ends the whole. Each imports only those listed
after it in the import contract of `pyproject.toml`.
"""
