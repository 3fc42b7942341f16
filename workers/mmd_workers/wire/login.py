"""The login of a process at the NATS server, and the check of NATS URLs. Independent of connections."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Login:
    """A user of a NATS server. It is never part of a URL, so that no message, log or repr can contain the password.

    `previous`: name under which the server accepts the password from before a rotation. `folder`: its files `username` and
    `password`, if they exist, hold the present login; they are read at every connection.
    """

    user: str
    password: str = field(repr=False)
    previous: str = ""
    folder: Path | None = None

    def at_attempt(self, number: int) -> Login:
        """The login to present at one of several attempts in a row. Every other attempt uses the previous name.

        A server that restarts for a rotation, and the files here, may be one rotation apart.
        """
        user = self._read("username") or self.user
        name = self.previous if self.previous and number % 2 else user
        return replace(self, user=name, password=self._read("password") or self.password)

    def _read(self, file: str) -> str:
        try:
            return (self.folder / file).read_text().strip() if self.folder else ""
        except OSError:
            return ""


def refuse_credentials_in(url: str) -> None:
    """Check that a NATS URL (or a comma-separated list of them) names servers only.

    Raises:
        ValueError: it contains a user name or password, which are not repeated in the message.
    """
    if any("@" in urlsplit(server.strip()).netloc for server in url.split(",")):
        raise ValueError(
            "the NATS URL contains credentials: pass the URL as scheme://host:port, the user as MMD_NATS_USERNAME and "
            "the password as MMD_NATS_PASSWORD"
        )
