"""Sources of weights: the files of a hub repository or a URL, with their sizes and digests.

Every source is an fsspec file system: the hub's, HTTP, or an object store, whose client is obstore.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any

import aiohttp
import fsspec
import httpx2
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from mmd_api.contract import environment as env
from mmd_api.contract.weights import LARGEST_BYTES, WeightsError
from mmd_api.weights import HUB_SCHEME, Download
from mmd_workers.weights.names import check_names

CHECKSUMS = "SHA256SUMS"
MAX_CHECKSUMS_BYTES = 4 * 2**20
LARGEST_ANSWER_BYTES = 2**26 + 2**20
LOOKUPS_AT_ONCE = 8
CONNECT_SECONDS, READ_SECONDS = 15, 60
PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
"""Files to fetch from a hub repository, which may hold the same weights in other formats too."""
MAX_ERROR_CHARACTERS = 400
_QUERY = re.compile(r"[?#][^\s'\"<>)\]]*")
_LINE = re.compile(r"^(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>.+)$")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a download.

    `name`: relative, with slashes. `path`: path in its file system. `digest`: `sha256:` and hex digits, or `git:` and hex digits for
    a small file of the hub.
    """

    name: str
    path: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """The files of one download.

    `version`: commit of a hub repository, else empty. `options`: arguments with which a file is opened.
    """

    download: Download
    files: tuple[RemoteFile, ...]
    version: str
    filesystem: Any
    options: Mapping[str, Any]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class _Bounded(aiohttp.ClientResponse):
    """A server's response, read up to the largest piece that is requested: an endless body takes no memory."""

    async def read(self) -> bytes:
        """Read the body.

        Raises:
            ClientPayloadError: the body is larger than that.
        """
        body = bytearray()
        async for part in self.content.iter_any():
            body += part
            if len(body) > LARGEST_ANSWER_BYTES:
                self.close()
                raise aiohttp.ClientPayloadError(
                    f"the server sent more than {LARGEST_ANSWER_BYTES} bytes for a piece; use one that answers range requests"
                )
        return bytes(body)


def look_up(download: Download) -> RemoteFolder:
    """Look up the files of a download.

    Raises:
        WeightsError: they do not exist, or cannot be reached with the credentials of the environment.
    """
    with named(download):
        return _hub(download) if download.url.startswith(HUB_SCHEME) else _listed(download)


def _hub(download: Download) -> RemoteFolder:
    endpoint, token = os.environ.get("HF_ENDPOINT"), os.environ.get("HF_TOKEN", "").strip() or None
    name, _, revision = download.url.removeprefix(HUB_SCHEME).partition("@")
    info = HfApi(endpoint=endpoint, token=token).model_info(
        name, revision=revision or None, files_metadata=True, timeout=READ_SECONDS
    )
    present = {file.rfilename: file for file in info.siblings or ()}
    files = tuple(
        RemoteFile(
            name=path,
            path=f"{name}@{info.sha}/{path}",
            size=int(present[path].size or 0),
            digest=f"sha256:{lfs.sha256}" if (lfs := present[path].lfs) else f"git:{present[path].blob_id}",
        )
        for path in sorted(present)
        if any(fnmatch(path, pattern) for pattern in PATTERNS)
    )
    check_names(download, [file.name for file in files])
    filesystem = HfFileSystem(endpoint=endpoint, token=token, skip_instance_cache=True)
    return _checked(RemoteFolder(download, files, str(info.sha), filesystem, {}))


def _listed(download: Download) -> RemoteFolder:
    """The files listed in `SHA256SUMS`, as `sha256sum` writes it."""
    scheme = download.url.partition("://")[0]
    filesystem = _filesystem(scheme, download)
    base = filesystem._strip_protocol(download.url).rstrip("/")
    listing = _small_file(filesystem, f"{base}/{CHECKSUMS}", download)
    digests: dict[str, str] = {}
    for number, line in enumerate(listing.splitlines(), 1):
        if not line.strip():
            continue
        entry = _LINE.match(line)
        if not entry:
            raise WeightsError(
                "WeightsNotFound",
                f"{download.field}: line {number} of {download.url}/{CHECKSUMS} is no digest and file name; "
                "write the file with `sha256sum` (docs/models.md)",
            )
        name = str(PurePosixPath(entry["name"]))
        if name != CHECKSUMS:  # `sha256sum *` lists its own output too, hashed before it was written
            digests[name] = entry["digest"].lower()
    check_names(download, digests)

    def file(name: str) -> RemoteFile:
        path = f"{base}/{name}"
        size = filesystem.info(path).get("size")
        if size is None:
            raise WeightsError(
                "WeightsNotFound",
                f"{download.field}: the server of {download.url} does not report the size of {name}; use one that sends Content-Length",
            )
        return RemoteFile(name, path, int(size), f"sha256:{digests[name]}")

    with ThreadPoolExecutor(LOOKUPS_AT_ONCE) as pool:
        files = tuple(pool.map(file, sorted(digests)))
    return _checked(RemoteFolder(download, files, "", filesystem, {}))


def _small_file(filesystem: Any, path: str, download: Download) -> str:
    content: bytes = filesystem.cat_file(path, start=0, end=MAX_CHECKSUMS_BYTES + 1)
    if len(content) > MAX_CHECKSUMS_BYTES:
        raise WeightsError(
            "WeightsNotFound",
            f"{download.field}: {CHECKSUMS} has more than {MAX_CHECKSUMS_BYTES} bytes; list the model's files alone",
        )
    return content.decode("utf-8", "replace")


def _filesystem(scheme: str, download: Download) -> Any:
    if scheme in ("http", "https"):
        headers = {"Accept-Encoding": "identity"}
        if token := os.environ.get(env.WEIGHTS_TOKEN, "").strip():
            headers["Authorization"] = f"Bearer {token}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        client = {
            "headers": headers,
            "timeout": timeout,
            "auto_decompress": False,
            "response_class": _Bounded,
        }
        return fsspec.filesystem(scheme, client_kwargs=client, skip_instance_cache=True)
    try:
        from obstore.fsspec import FsspecStore  # loaded only where it is used
    except ImportError as error:
        raise WeightsError(
            "WeightsNotFound",
            f"{download.field}.storage.url: this image cannot read {scheme}:// URLs ({error}); install obstore in it, or use an https:// URL of the store",
        ) from error
    client = {"connect_timeout": f"{CONNECT_SECONDS}s", "timeout": f"{READ_SECONDS}s"}
    if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        client["allow_http"] = "true"
    # `download` makes the other retries.
    retries = {"max_retries": 1, "retry_timeout": timedelta(seconds=READ_SECONDS)}
    return FsspecStore(scheme, client_options=client, retry_config=retries, skip_instance_cache=True)


def _checked(source: RemoteFolder) -> RemoteFolder:
    where = f"{source.download.field}: {source.download.url}"
    if not source.files:
        raise WeightsError(
            "WeightsNotFound",
            f"{where} has no files of a model; use the Hugging Face layout "
            "(config.json, *.safetensors, tokenizer.json, processor settings)",
        )
    for file in source.files:
        if not 0 <= file.size <= LARGEST_BYTES:
            raise WeightsError(
                "WeightsNotFound",
                f"{where}: the server reports {file.size} bytes of {file.name}; fix the server",
            )
    return source


@contextmanager
def named(download: Download) -> Iterator[None]:
    """Turn errors of file systems into a WeightsError that names the remedy."""
    where = f"{download.field}: {download.url}"
    token = "spec.model.storage.tokenSecret"  # noqa: S105 - the name of a field
    try:
        yield
    except GatedRepoError as error:
        raise WeightsError(
            "WeightsDenied",
            f"{where} is gated; accept its license on the hub and set {token} to a Secret with your token",
        ) from error
    except RevisionNotFoundError as error:
        raise WeightsError(
            "WeightsNotFound", f"{where}: the repository has no such revision; fix {download.field}.revision"
        ) from error
    except RepositoryNotFoundError as error:
        raise WeightsError(
            "WeightsNotFound",
            f"{where} does not exist on the hub or is private; check the spelling, or set {token} to a Secret with your token",
        ) from error
    except (HfHubHTTPError, aiohttp.ClientResponseError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else error.status
        if status in (401, 403):
            raise _denied(where, f"status {status}") from error
        raise _unreachable(where, error) from error
    except PermissionError as error:
        raise _denied(where, _shown(error)) from error
    except FileNotFoundError as error:
        cause = error.__cause__  # fsspec raises this for any failure over HTTP
        if isinstance(cause, aiohttp.ClientResponseError) and cause.status in (401, 403):
            raise _denied(where, f"status {cause.status}") from error
        if isinstance(cause, (aiohttp.ClientError, OSError)) and getattr(cause, "status", 0) not in (
            404,
            410,
        ):
            raise _unreachable(where, cause) from error
        raise _absent(where, _shown(error)) from error
    except (OSError, aiohttp.ClientError, httpx2.HTTPError, TimeoutError, ValueError) as error:
        raise _unreachable(where, error) from error
    except Exception as error:
        if not type(error).__module__.startswith("obstore"):
            raise
        if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
            raise _denied(where, type(error).__name__) from error
        if type(error).__name__ == "NotFoundError":
            raise _absent(where, type(error).__name__) from error
        raise _unreachable(where, error) from error


def _absent(where: str, words: str) -> WeightsError:
    return WeightsError(
        "WeightsNotFound",
        f"{where} does not exist, or lacks {CHECKSUMS} or a file that it lists ({words}); fix the URL, or upload the file",
    )


def _denied(where: str, words: str) -> WeightsError:
    return WeightsError(
        "WeightsDenied",
        f"{where} refuses the credentials ({words}); set spec.model.storage.tokenSecret or credentialsSecret to a Secret that may read it",
    )


def _unreachable(where: str, error: Exception) -> WeightsError:
    return WeightsError(
        "WeightsUnreachable",
        f"{where} cannot be read ({_shown(error)}); check the network between this pod and the server, "
        "spec.network.egress among it",
    )


def _shown(error: Exception) -> str:
    """Shorten an error for a message with many readers.

    URLs lose everything after their path, which may sign a request. The text is short enough to end a pod's termination message.
    """
    if isinstance(error, aiohttp.ClientResponseError):
        return f"{type(error).__name__}: status {error.status} of {error.request_info.real_url.host}"
    return f"{type(error).__name__}: {_QUERY.sub('?…', str(error))}"[:MAX_ERROR_CHARACTERS]
