"""Sends random requests to gateways that need API keys, side by side, and reports what must never happen.

Requests are made from the OpenAPI document that the gateways serve, and every answer is compared with it. Bodies come from schemathesis: valid
ones, and ones that break their schema. Some are changed further, sent broken, or left by their client; some
are sent again (`repeating`). Some come from a tenant at its limits, or without a valid key. Fields that
chance leaves out are sent on purpose. Generated work is bounded, so that a run asks many questions instead of
few long ones.
"""

from __future__ import annotations

import base64
import copy
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.core import NOT_SET

from mmd_api.tenants import hash_of
from mmd_cli.local.pods import LocalSecrets
from support.serving.asking import TIMEOUT, Answer, Asked, ask
from support.serving.documented import Documented
from support.serving.fields import Fields, fields_of, names_in, takes_json
from support.serving.local_deployment import ROOT, Deployment
from support.serving.repeating import Repeat

MODEL = "builtin/demo"
CLIENTS = 8
LEAVES_AFTER_SECONDS = (0.005, 0.05, 0.3)
MOST_TOKENS = 12
# Different valid bodies of one operation, and as many invalid ones; further requests repeat them with changes.
MOST_DIFFERENT = 400
CHANGED_SHARE = 0.25  # share of the other requests whose body is changed
TIMEOUTS = ("", "-1", "0", "1e9", "nan", "0.001", "9" * 30)
QUERY_JUNK = ("", "0", "-1", "10001", "9" * 30, "x", "é", "\x00")
FILES = 3  # uploaded before the first request; their bytes are a picture
KEYS = 40  # idempotency keys that requests share
REPEATED_SHARE = 0.1  # share of the requests for tokens that have their own key and are sent again
STREAMED_SHARE = 0.7  # share of the repeated requests
TOKENS_FIELDS = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),  # usually only one is sent
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
BOTH_SHARE = 0.05  # share of requests with several of these fields, which are refused
KEY, LIMITED, EXPIRED = "key-of-the-fuzz", "key-of-one-with-limits", "key-of-last-year"
TENANTS = [
    {
        "name": "fuzz",
        "keys": [{"hash": hash_of(KEY)}, {"hash": hash_of(EXPIRED), "expires": "2026-01-01T00:00:00Z"}],
    },
    {
        "name": "limited",
        "keys": [{"hash": hash_of(LIMITED)}],
        "limits": {"concurrentRequests": 1, "requestsPerMinute": 20, "tokensPerDay": 10_000},
    },
]
TAKEN = ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY})
FOREIGN_ORIGIN = (
    "https://elsewhere.example"  # a page of it may send nothing to a server on a loopback address
)
FOREIGN_SHARE = 0.02
LIMITED_SHARE, REFUSED_SHARE = 0.08, 0.05
REFUSED: tuple[dict[str, str], ...] = (
    {}, {"authorization": "Bearer"}, {"authorization": f"Bearer {KEY[:-1]}"}, {"authorization": f"Bearer {KEY.upper()}"}, {"authorization": f"Basic {KEY}"},
    {"authorization": KEY}, {"x-api-key": f"{KEY}x"}, {"x-api-key": EXPIRED}, {"authorization": f"Bearer {KEY}", "x-api-key": LIMITED},
)  # fmt: skip
"""Headers without a valid key, or with two."""
QUESTION = "What color is the shape?"
ASKS = {"messages": [{"role": "user", "content": QUESTION}]}
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": ASKS,
    "/v1/completions": {"prompt": QUESTION},
    "/v1/responses": {"input": QUESTION},
    "/v1/messages": ASKS,
    "/v1/messages/count_tokens": ASKS,
    "/tokenize": {"prompt": QUESTION},
    "/detokenize": {"tokens": [1, 2, 3]},
}
"""Valid requests.

With a few fields of a random body, most stay valid, and reach code that an invalid one does not.
"""
BASED_SHARE = 0.5
PICTURE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**30, "", "x", "\ud800", "\x00", "é" * 3000, [], {}, [[]], {"type": "text"}, [{}], PICTURE, "data:image/png;base64,AAAA",
    "http://127.0.0.1:1/", "file:///etc/passwd", "x" * 20_000, "<|im_start|>", "auto", {"type": "json_object"}, {"type": "function", "function": {"name": "f", "parameters": {}}},
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "What is it?"}]}],
    ASKS["messages"], QUESTION,
)  # fmt: skip


@dataclass
class Report:
    """The result of a run. `failures`: each failed request, and what was wrong with its answer."""

    requests: int = 0
    left: int = 0  # requests whose clients left before the answer was complete
    repeated: Counter[str] = field(default_factory=Counter)  # by how requests were sent again, with statuses
    statuses: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    slowest_seconds: float = 0.0
    unsent: list[str] = field(default_factory=list)  # fields that no request had, with their path
    failures: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The report for a file."""
        return {
            "requests": self.requests,
            "left_by_their_clients": self.left,
            "sent_again": dict(sorted(self.repeated.items())),
            "statuses": dict(sorted(self.statuses.items())),
            "codes": dict(self.codes.most_common()),
            "slowest_seconds": round(self.slowest_seconds, 1),
            "fields_not_sent": self.unsent,
            "failures": self.failures,
        }


@contextmanager
def fuzzed_deployment(folder: Path) -> Iterator[Deployment]:
    """examples/demo.yaml with two gateways that need API keys."""
    resource = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())
    resource["spec"]["gateway"] = {"auth": {"keysSecret": "keys"}, "files": {}}
    file, keys = folder / "fuzz.yaml", folder / "keys.yaml"
    file.write_text(yaml.safe_dump(resource))
    keys.write_text(yaml.safe_dump({"tenants": TENANTS}))
    with Deployment(file, secrets=LocalSecrets(keys=keys)) as deployment:
        yield deployment


def fuzz(client: httpx.Client, count: int, seed_number: int, different: int = MOST_DIFFERENT) -> Report:
    """Send `count` requests, and further ones with the fields that these have left out.

    The same seed gives the same requests. `different`: bodies that are made for each operation at most.
    """
    report, lock = Report(), threading.Lock()
    with ThreadPoolExecutor(CLIENTS) as threads:
        document = client.get("/openapi.json", headers=TAKEN[0]).raise_for_status().json()
        documented = Documented(document)
        free = threading.Semaphore(2 * CLIENTS)

        def wrong(asked: Asked, reply: Answer) -> str:
            if reply.wrong or not reply.status:
                return reply.wrong
            kind = reply.headers.get("content-type", "")
            return documented.wrong(asked.method, asked.path, reply.status, kind, reply.body)

        def answer(sent: Asked | Repeat) -> None:
            try:
                start = time.monotonic()
                answers = sent.send(client) if isinstance(sent, Repeat) else [ask(client, sent)]
                seconds = (time.monotonic() - start) / len(answers)
                asked = sent.asked if isinstance(sent, Repeat) else sent
                faults = [fault for reply in answers if (fault := wrong(asked, reply))]
                with lock:
                    report.requests += 1
                    report.left += bool(asked.leaves_after)
                    report.slowest_seconds = max(report.slowest_seconds, seconds)
                    if isinstance(sent, Repeat):
                        report.repeated[f"{sent.how}: {[reply.status for reply in answers]}"] += 1
                    for reply in answers:
                        route = documented.path(asked.path) or asked.path
                        report.statuses[f"{asked.method} {route} {reply.status}"] += 1
                        report.codes[reply.code] += bool(reply.code)
                    report.failures += [
                        f"{fault}: {asked.method} {asked.path} {asked.headers} {asked.content[:2000]!r}"
                        for fault in faults
                    ]
            except Exception as error:  # noqa: BLE001 - a thread would keep it to itself
                with lock:
                    report.failures.append(f"{type(error).__name__}: {error}: {sent}")
            finally:
                free.release()

        def send(sent: Asked | Repeat) -> None:
            free.acquire()
            threads.submit(answer, sent)

        files = [_uploaded(client, f"picture-{number}.png") for number in range(FILES)]
        report.unsent = _generate(document, count, seed_number, send, files, different)
    report.failures += [f"no request had {name}" for name in report.unsent]
    return report


def _uploaded(client: httpx.Client, name: str) -> str:
    """The id of a file that has been uploaded."""
    form = {"files": {"file": (name, base64.b64decode(PICTURE.partition(",")[2]), "image/png")}}
    answer = client.post("/v1/files", data={"purpose": "vision"}, headers=TAKEN[0], **form)
    return str(answer.raise_for_status().json()["id"])


def _generate(
    document: dict[str, Any],
    count: int,
    seed_number: int,
    send: Callable[[Asked | Repeat], None],
    files: Sequence[str],
    different: int,
) -> list[str]:
    """Send the requests, and return the fields that none of them had."""
    schema = schemathesis.openapi.from_dict(document)
    operations = [result.ok() for result in schema.get_all_operations()]
    posts = [
        operation
        for operation in operations
        if operation.method == "post" and takes_json(document, operation.path)
    ]
    others = [operation for operation in operations if operation not in posts]
    shares = [(operation, mode) for operation in posts for mode in GenerationMode]
    rng = random.Random(seed_number)
    for _ in range(others_count := count // 10):
        operation = rng.choice(others)
        parameters = document["paths"][operation.path][operation.method].get("parameters", ())
        send(_other(rng, operation.method.upper(), operation.path, parameters, files))
    remaining = count - others_count
    unsent: dict[str, set[str]] = {}
    for number, (operation, mode) in enumerate(shares):
        share = remaining // (len(shares) - number)
        remaining -= share
        bodies = _bodies(operation, mode, min(share, different), seed_number)
        fields = set(fields_of(document, operation.path).names())
        at_top = sorted(name for name in fields if "." not in name and "[" not in name)
        left_out = unsent.setdefault(operation.path, fields)
        for at in range(share):
            body = bodies[at % len(bodies)]
            if operation.path in TOKENS_FIELDS and rng.random() < REPEATED_SHARE:
                repeat = _repeat(rng, operation.path, body, f"{seed_number}-{number}-{at}")
                left_out -= set(names_in(repeat.asked.content))
                send(repeat)
                continue
            changes = at >= len(bodies) or rng.random() < CHANGED_SHARE
            asked = _post(rng, operation.path, _body(rng, operation.path, body, at_top if changes else ()))
            left_out -= set(names_in(asked.content))
            send(asked)
    for path, names in unsent.items():
        for name in sorted(names, key=len, reverse=True):  # a field brings those that it lies in
            if name not in names:
                continue
            asked = _on_purpose(rng, fields_of(document, path), path, name)
            names -= set(names_in(asked.content))
            send(asked)
    return [f"{path} {name}" for path, names in unsent.items() for name in sorted(names)]


def _on_purpose(rng: random.Random, fields: Fields, path: str, name: str) -> Asked:
    """A request with a field that chance has left out."""
    body = fields.with_field(name) | {"model": MODEL}
    if (others := TOKENS_FIELDS.get(path)) is not None:
        _bound(rng, body, (name,) if name in others else others)
    headers = {"content-type": "application/json", "x-request-timeout": TIMEOUT, **TAKEN[0]}
    return Asked("POST", path, headers, json.dumps(body).encode())


def _bodies(operation: Any, mode: Any, count: int, seed_number: int) -> list[Any]:
    """`count` bodies of an operation, or fewer if its schema has no more different ones."""
    bodies: list[Any] = []

    @seed(seed_number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def generate(case: Any) -> None:
        bodies.append(case.body)

    generate()
    return bodies


def _other(
    rng: random.Random, method: str, path: str, parameters: Sequence[dict[str, Any]], files: Sequence[str]
) -> Asked:
    """A request without a JSON body: names and queries at random, sometimes with another method."""
    name = rng.choice((MODEL, *files, "x", "../models", "é\x00", "%", "a/b/c", "?", "#", "x" * 5000))
    query = [
        (one["name"], str(rng.choice((*one["schema"].get("enum", ()), 1, 10, *files, *QUERY_JUNK))))
        for one in parameters
        if one["in"] == "query" and rng.random() < 0.4
    ]
    if rng.random() < 0.1:
        query.append((rng.choice(("x", "limit", "é")), "1"))
    headers = dict(rng.choice(TAKEN))
    if rng.random() < 0.1:
        headers["x-request-timeout"] = rng.choice(TIMEOUTS)
    content = b""
    if method == "POST":
        headers["content-type"], content = _form(rng)
    elif method == "DELETE":
        name = rng.choice((files[-1], "x", "é/x"))  # the other files stay
    elif rng.random() < 0.1:
        method = rng.choice(("PUT", "PATCH", "HEAD", "OPTIONS", "POST", "DELETE"))
        name = "x"
    target = re.sub(r"\{\w+\}", lambda _: quote(name, safe=""), path)
    return Asked(method, f"{target}?{urlencode(query)}" if query else target, headers, content)


def _form(rng: random.Random) -> tuple[str, bytes]:
    """The content type and the body of an upload, sometimes broken."""
    fields: dict[str, Any] = {"purpose": rng.choice(("vision", "user_data", "vision", "batch", "", "é"))}
    if rng.random() < 0.4:
        fields["expires_after[anchor]"] = rng.choice(("created_at", "created_at", "now"))
        fields["expires_after[seconds]"] = rng.choice(("3600", "1", "0", "-1", "1.5", "9" * 30, "é"))
    if rng.random() < 0.1:
        fields[rng.choice(("x", "file", "purpose[]"))] = "x"
    data = rng.choice(
        (base64.b64decode(PICTURE.partition(",")[2]), b"", b"x", b"%PDF-1.4", rng.randbytes(5000))
    )
    filename = rng.choice(("picture.png", "", "../../x", "é\r\n.png", "x" * 5000))
    files = {"file": (filename, data, rng.choice(("image/png", "video/mp4", "text/html")))}
    request = httpx.Request("POST", "http://x/", data=fields, files=files)
    kind, body = request.headers["content-type"], request.read()
    match rng.randrange(12):
        case 0:
            body = body[: rng.randrange(len(body) + 1)]
        case 1:
            body = rng.randbytes(rng.randrange(200))
        case 2:
            kind = rng.choice(
                ("multipart/form-data", "application/json", "multipart/form-data; boundary=" + "x" * 99)
            )
    return kind, body


def _body(rng: random.Random, path: str, body: Any, fields: Sequence[str]) -> Any:
    """A copy of a body. It is changed somewhere if `fields`, the fields of its schema, are given."""
    body = _with_whole_numbers(body)
    if isinstance(body, dict) and rng.random() < BASED_SHARE:
        names = rng.sample(sorted(body), min(len(body), rng.randrange(4)))
        body = copy.deepcopy(BASES[path]) | {name: body[name] for name in names}
    if fields:
        body = _changed(rng, body, fields)
    if isinstance(body, dict):
        if rng.random() < 0.9:
            body["model"] = MODEL
        if path in TOKENS_FIELDS:
            _bound(rng, body, TOKENS_FIELDS[path])
    return body


def _post(rng: random.Random, path: str, body: Any) -> Asked:
    headers = {"content-type": "application/json", "x-request-timeout": TIMEOUT}
    is_bytes = isinstance(body, bytes)  # no JSON
    content = body if is_bytes else b"" if body is NOT_SET else json.dumps(body).encode()
    match rng.randrange(40):
        case 0:
            content = content[: rng.randrange(len(content) + 1)]
        case 1:
            content = rng.randbytes(rng.randrange(200))
        case 2:
            headers["content-type"] = rng.choice(("text/plain", "application/json; charset=utf-16", "x"))
        case 3:
            headers["x-request-timeout"] = rng.choice(TIMEOUTS)
    if rng.random() < 0.2:
        headers["idempotency-key"] = rng.choice(("", "a b", "x" * 300, *(f"key-{n}" for n in range(KEYS))))
        if rng.random() < 0.2:
            headers["last-event-id"] = rng.choice(("0", "3", "0123abcd-0", "0123abcd-999999999", "x-1", ""))
    leaves_after = rng.choice(LEAVES_AFTER_SECONDS) if rng.random() < 0.03 else 0.0
    drawn = rng.random()
    is_refused = drawn < REFUSED_SHARE
    if is_refused:
        headers |= rng.choice(REFUSED)
    elif drawn < REFUSED_SHARE + LIMITED_SHARE:
        headers["authorization"] = f"Bearer {LIMITED}"
    else:
        headers |= rng.choice(TAKEN)
    if rng.random() < FOREIGN_SHARE:
        headers["origin"] = FOREIGN_ORIGIN
    return Asked("POST", path, headers, content, leaves_after, is_refused and "origin" not in headers)


def _repeat(rng: random.Random, path: str, body: Any, key: str) -> Repeat:
    """A mostly valid request, with one field of a random body, to be sent again."""
    content = copy.deepcopy(BASES[path])
    body = _with_whole_numbers(body)
    if isinstance(body, dict) and body:
        name = rng.choice(sorted(body))
        content[name] = body[name]
    content |= {"model": MODEL, "stream": rng.random() < STREAMED_SHARE}
    _bound(rng, content, TOKENS_FIELDS[path])
    headers = {"content-type": "application/json", "x-request-timeout": TIMEOUT, **rng.choice(TAKEN)}
    return Repeat.drawn(rng, Asked("POST", path, headers, json.dumps(content).encode()), key)


def _with_whole_numbers(value: Any) -> Any:
    """A copy with integers where a schema takes `3.0` for one, which the gateway does not."""
    if isinstance(value, dict):
        return {name: _with_whole_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return list(map(_with_whole_numbers, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bound(rng: random.Random, body: dict[str, Any], names: Sequence[str]) -> None:
    """Bound the tokens and answers of requests that would be taken. A value that is not a number stays.

    Of several `names` of one setting, one is kept.
    """
    kept_name = rng.choice(names)
    for name in names:
        value = body.get(name)
        if name != kept_name and rng.random() >= BOTH_SHARE:
            body.pop(name, None)
        elif (value is None and name == kept_name) or (type(value) is int and value > MOST_TOKENS):
            body[name] = MOST_TOKENS
    for field_name in ("n", "best_of"):
        if type(body.get(field_name)) is int and body[field_name] > 2:
            body[field_name] = 2
    if type(body.get("min_tokens")) is int and body["min_tokens"] > MOST_TOKENS:
        body["min_tokens"] = MOST_TOKENS


def _changed(rng: random.Random, body: Any, fields: Sequence[str]) -> Any:
    """A body with junk somewhere, or with something missing or repeated."""
    if isinstance(body, dict) and rng.random() < 0.4:
        return body | {rng.choice(fields): copy.deepcopy(rng.choice(JUNK))}
    places = list(_places(body))
    if not places:
        return rng.choice(JUNK)
    holder, key = rng.choice(places)
    junk = copy.deepcopy(rng.choice(JUNK))
    match rng.randrange(4):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        case 2 if isinstance(holder, dict):
            holder[rng.choice(("x", "type", "role", "content", "tools", "stream", ""))] = junk
        case _:
            holder[key] = junk
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)
