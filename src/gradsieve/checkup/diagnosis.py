"""What a check-up finds."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fine", "doubtful", "broken"]
FINE: Verdict = "fine"
DOUBTFUL: Verdict = "doubtful"
BROKEN: Verdict = "broken"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    seen: str
    """In numbers, where there are any."""
    advice: str = ""
    """What to do; empty where nothing is to be done."""


@dataclass(frozen=True)
class Diagnosis:
    """All that was looked at. ``print(diagnosis)`` for a person, ``diagnosis["losses"]`` for one finding."""

    findings: tuple[Finding, ...]
    plain_seconds: float | None = None
    """Of a plain training step; None where it could not be measured."""
    dds_seconds: float | None = None
    """Of a step with DDS, the scorer's update included."""

    @property
    def ok(self) -> bool:
        """Whether DDS can work: nothing is broken, though something may be doubtful."""
        return all(finding.verdict != BROKEN for finding in self.findings)

    @property
    def summary(self) -> str:
        """One sentence."""
        broken, doubtful = ([f.name for f in self.findings if f.verdict == verdict] for verdict in (BROKEN, DOUBTFUL))
        rest = f" Doubtful: {', '.join(doubtful)}." if doubtful else ""
        if broken:
            return f"DDS cannot work as it is. Broken: {', '.join(broken)}.{rest}"
        return f"DDS can work.{rest or ' Nothing is doubtful.'}"

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, name: str) -> Finding:
        return {finding.name: finding for finding in self.findings}[name]

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            head = f"{finding.verdict:<9} {finding.name:<12} "
            indent = " " * len(head)
            lines.append(textwrap.fill(finding.seen, 110, initial_indent=head, subsequent_indent=indent))
            if finding.advice:
                advice = textwrap.fill(
                    finding.advice, 110, initial_indent=indent + "-> ", subsequent_indent=indent + "   "
                )
                lines.append(advice)
        return "\n".join([*lines, self.summary])
