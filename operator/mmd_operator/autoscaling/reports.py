"""Reads the reports of pods, from `/state` and `/demand`. An invalid report is refused with the reason.

Pure: takes the bytes of an HTTP answer and the name of the pod that sent it. `mmd_api.contract.load` defines the answers.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from mmd_api.contract.load import GatewayStatus, WorkerStatus

MAX_REPORT_BYTES = 256 * 1024
MAX_PLACE_CHARACTERS = 100
"""Of the field that a message names: its keys come from the pod."""


class ReportError(ValueError):
    """The answer is not this pod's report; the message has the reason, and the answer counts for nothing."""


def worker_report(answer: bytes, pod: str, revision: str) -> WorkerStatus:
    """Read a worker's `/state`.

    Raises:
        ReportError: no such report, or another pod's or another pipeline revision's.
    """
    found = _read(WorkerStatus, answer, pod, revision)
    if fault := found.load.fault():
        raise ReportError(f"pod {pod} returned an invalid load report ({fault})")
    return found


def gateway_report(answer: bytes, pod: str, revision: str) -> GatewayStatus:
    """Read a gateway's `/demand`.

    Raises:
        ReportError: no such report, or another pod's or another pipeline revision's.
    """
    return _read(GatewayStatus, answer, pod, revision)


_R = TypeVar("_R", WorkerStatus, GatewayStatus)


def _read(kind: type[_R], answer: bytes, pod: str, revision: str) -> _R:
    if len(answer) > MAX_REPORT_BYTES:
        raise ReportError(f"pod {pod} returned more than {MAX_REPORT_BYTES} bytes")
    try:
        found = kind.model_validate_json(answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:MAX_PLACE_CHARACTERS] or "the response"
        raise ReportError(f"pod {pod} returned an invalid report ({where}: {first['msg']})") from error
    if found.pod != pod:
        raise ReportError(f"pod {pod} identifies itself as pod {found.pod}")
    if found.revision != revision:
        raise ReportError(f"pod {pod} belongs to revision {found.revision}, not {revision}")
    return found
