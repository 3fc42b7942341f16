"""Talks to a gateway as any user would: through the OpenAI client, with local files as content parts."""

from __future__ import annotations

import base64
import mimetypes
import os
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai

from mmd_api.contract import paths
from mmd_cli.errors import CommandError

API_KEY = "MMD_API_KEY"
TRUSTED = "SSL_CERT_FILE"
"""Environment variable from which httpx, below the OpenAI client, takes trusted certificates."""
TIMINGS_HEADER = {"x-mmd-timings": "true"}


class AskError(CommandError):
    """The gateway refused the request, in its own words, or could not be reached."""


@dataclass(slots=True)
class Answer:
    """A finished answer. `timings`: milliseconds by phase; `request_id` finds its timeline."""

    text: str = ""
    request_id: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""


def media_part(kind: str, data: bytes, mime: str) -> dict[str, Any]:
    """A content part for a file: `image`, `video` or `audio`."""
    url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def file_part(kind: str, path: Path) -> dict[str, Any]:
    """A content part for a file on this machine.

    Raises:
        AskError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise AskError(f"--{kind} {path}: {error.strerror}; pass the path of a readable file") from error
    return media_part(kind, data, mimetypes.guess_type(path.name)[0] or f"{kind}/octet-stream")


class Client:
    """A client of one gateway and one model."""

    def __init__(self, url: str, timeout_seconds: float = 600.0) -> None:
        """Read the API key from the environment variable MMD_API_KEY.

        An option would show in the list of processes.

        Raises:
            AskError: the variable does not hold an API key.
        """
        self.url = url
        self._openai = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key=_api_key() or "none",
            timeout=timeout_seconds,
            max_retries=0,
        )
        self._model = ""

    @property
    def model(self) -> str:
        """The name of the served model.

        Raises:
            AskError: no model is served to this API key, or no gateway responded.
        """
        if not self._model:
            try:
                served = self._openai.models.list().data
            except openai.AuthenticationError as error:
                raise AskError(f"{error.message}; set {API_KEY} to an API key of this gateway") from error
            except openai.OpenAIError as error:
                raise AskError(f"no gateway responded at {self.url}: {_cause(error)}") from error
            if not served:
                raise AskError(
                    f"the API key in {API_KEY} allows no model that is served at {self.url}; use another key, or have its tenant's models changed"
                )
            self._model = served[0].id
        return self._model

    def stream(
        self, messages: list[dict[str, Any]], answer: Answer, max_tokens: int = 256, **options: Any
    ) -> Iterator[str]:
        """Yield pieces of text as they arrive. `answer` is complete when the iterator ends.

        Raises:
            AskError: the gateway rejected the request, failed, or is unreachable.
        """
        try:
            with self._openai.chat.completions.create(  # type: ignore[call-overload]
                model=self.model,
                messages=messages,
                max_tokens=max_tokens,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers=TIMINGS_HEADER,
                **options,
            ) as chunks:
                for chunk in chunks:
                    answer.request_id = chunk.id
                    extra = chunk.model_extra or {}
                    answer.timings = extra.get("timings") or answer.timings
                    if chunk.usage is not None:
                        answer.usage = chunk.usage.model_dump(exclude_none=True)
                    for choice in chunk.choices:
                        answer.finish_reason = choice.finish_reason or answer.finish_reason
                        if choice.delta.content:
                            answer.text += choice.delta.content
                            yield choice.delta.content
        except openai.APIStatusError as error:
            raise AskError(f"{error.status_code}: {error.message}") from error
        except openai.OpenAIError as error:
            raise AskError(f"no response from the gateway at {self.url}: {_cause(error)}") from error

    def ask(self, messages: list[dict[str, Any]], **options: Any) -> Answer:
        """Ask, and return the complete answer."""
        answer = Answer()
        for _ in self.stream(messages, answer, **options):
            pass
        return answer


def _cause(error: openai.OpenAIError) -> str:
    """Why a gateway did not respond, with the remedy if its certificate is not trusted."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return str(error)
    return (
        f"its certificate is not trusted ({cause.verify_message}); name the file with that of its issuer in {TRUSTED}, "
        "and address the gateway by a name that the certificate has"
    )


def _api_key() -> str:
    """The API key of this process; empty if it has none.

    Whitespace around it, such as the end of a line of a file, is removed.

    Raises:
        AskError: the key cannot be sent.
    """
    key = os.environ.get(API_KEY, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise AskError(
            f"{API_KEY} has spaces or characters that no API key has; set it to the key as it was printed"
        )
    return key


def timeline(admin_urls: Sequence[str], request_id: str) -> dict[str, Any]:
    """Phases of a finished request, from the gateway that handled it and still remembers it.

    Raises:
        AskError: no gateway knows the request, or no longer, or there is no admin port of a gateway.
    """
    faults = []
    for admin_url in admin_urls:
        try:
            return _timeline(admin_url, request_id)
        except AskError as error:  # another gateway may have handled it
            faults.append(str(error))
    raise AskError("\n".join(dict.fromkeys(faults)) or "there is no gateway; start one, or give its --url")


def _timeline(admin_url: str, request_id: str) -> dict[str, Any]:
    try:
        response = httpx.get(
            f"{admin_url}{paths.GATEWAY_REQUESTS}/{quote(request_id, safe='')}", timeout=10.0
        )
    except httpx.HTTPError as error:
        raise AskError(f"no gateway responded at {admin_url} ({error}); check that it is running") from error
    if response.status_code != 200:
        raise AskError(
            f"{admin_url} has no request {request_id}; a gateway keeps only the newest requests "
            "and serves them on its admin port"
        )
    data: dict[str, Any] = response.json()
    return data
