"""Reads pods' reports from `/state` and `/demand`. An invalid report is rejected with a reason.

Pure: takes the bytes of an HTTP answer and the name of the pod that sent it. `mmd_api.contract.load` defines the answers.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from mmd_api.contract.load import GatewayStatus, WorkerStatus

MAX_REPORT_BYTES = 256 * 1024
MAX_PLACE_CHARACTERS = 100
"""Length limit of a field path in a message, since its keys come from the pod."""


class ReportError(ValueError):
    """The answer is not this pod's report and is ignored; the message has the reason."""


def worker_report(answer: bytes, pod: str, revision: str) -> WorkerStatus:
    """Read a worker's `/state`.

    Raises:
        ReportError: the answer is no such report, or is from another pod or pipeline revision.
    """
    report = _read(WorkerStatus, answer, pod, revision)
    if fault := report.load.fault():
        raise ReportError(f"pod {pod} returned an invalid load report ({fault})")
    return report


def gateway_report(answer: bytes, pod: str, revision: str) -> GatewayStatus:
    """Read a gateway's `/demand`.

    Raises:
        ReportError: the answer is no such report, or is from another pod or pipeline revision.
    """
    return _read(GatewayStatus, answer, pod, revision)


_R = TypeVar("_R", WorkerStatus, GatewayStatus)


def _read(kind: type[_R], answer: bytes, pod: str, revision: str) -> _R:
    if len(answer) > MAX_REPORT_BYTES:
        raise ReportError(f"pod {pod} returned more than {MAX_REPORT_BYTES} bytes")
    try:
        report = kind.model_validate_json(answer)
    except ValidationError as error:
        first_fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first_fault["loc"])[:MAX_PLACE_CHARACTERS] or "the response"
        raise ReportError(f"pod {pod} returned an invalid report ({where}: {first_fault['msg']})") from error
    if report.pod != pod:
        raise ReportError(f"pod {pod} identifies itself as pod {report.pod}")
    if report.revision != revision:
        raise ReportError(f"pod {pod} belongs to revision {report.revision}, not {revision}")
    return report
