"""The result of a comparison, and its text form. Independent of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mmd_api.contract.pools import Modality


@dataclass(slots=True)
class Case:
    """One prompt, and how far both sides agree on it.

    `refused`: why it was not served; `failed`: why it was not compared.
    """

    name: str
    modalities: frozenset[Modality] = frozenset()
    tokens: tuple[int, int] = (0, 0)  # prompt tokens: split, whole
    features: float | None = None  # largest relative error
    logits: float | None = None
    outputs: tuple[int, int] = (0, 0)  # equal tokens, all tokens
    refused: str = ""
    failed: str = ""
    wrong: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The outcome in one or two words."""
        if self.refused:
            return "refused"
        if self.failed:
            return "not compared"
        return "differs" if self.wrong else "agrees"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of `mmd check`."""

    model: str
    model_type: str
    dtype: str
    takes: frozenset[Modality]
    cases: list[Case]

    @property
    def verdict(self) -> Literal["agrees", "differs", "incomplete"]:
        """`incomplete`: nothing differs, but a prompt was not compared, or none with some modality that the
        model takes.
        """
        verdicts = [case.verdict for case in self.cases]
        if "differs" in verdicts:
            return "differs"
        agreeing = [case for case in self.cases if case.verdict == "agrees"]
        compared = {modality for case in agreeing for modality in case.modalities}
        return (
            "agrees"
            if agreeing and "not compared" not in verdicts and compared >= self.takes
            else "incomplete"
        )


def lines_of(report: CheckReport) -> list[str]:
    """The report as lines of text."""
    takes = ", ".join(sorted(report.takes)) or "text only"
    lines = [
        f"model {report.model} ({report.model_type}) in {report.dtype}, accepts {takes}",
        "",
        f"{'prompt':<26}{'':<14}{'tokens':>8}{'features':>12}{'logits':>12}{'output':>9}",
    ]
    for case in report.cases:
        compared = case.verdict in ("agrees", "differs")
        tokens = str(case.tokens[0]) if compared else ""
        outputs = f"{case.outputs[0]}/{case.outputs[1]}" if compared else ""
        lines.append(
            f"{case.name:<26}{case.verdict:<14}{tokens:>8}{_error(case.features):>12}{_error(case.logits):>12}{outputs:>9}"
        )
        lines += [f"  {reason}" for reason in (case.refused, case.failed, *case.wrong) if reason]
    lines += ["", "features, logits: largest difference, relative to the largest value; output: equal tokens"]
    return lines


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
