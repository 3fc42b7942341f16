"""The gateway: validates, counts, routes, detokenises and streams requests. Loads no weights and decodes no media.

A request passes through these packages in order, and its answer returns through `api`:

- `api` serves HTTP in the shape of each API.
- `idempotency` gives repeats of a request the same answer.
- `content` validates what clients send.
- `intake` makes an exact prompt of it.
- `placement` decides which pods take the prompt, and when.
- `answers` turns tokens into parts of the answer.

Others work beside them:

- `output` parses and constrains what models write: calls, reasoning, text.
- `access` checks the keys and limits of tenants.
- `picker` chooses a gateway pod for proxies of the Gateway API.
- `page` serves the page at `/`.
- `basics` holds what all of them use.
- `process` starts and ends the gateway.

Tool calls have three places: the forms in which models write them are in `model.call_forms`, their grammar in `content.tools`, and their
parsers in `output`. Each package imports only those listed after it in the import contract of `pyproject.toml`.
"""
