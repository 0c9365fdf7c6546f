"""A check-up as a table for the terminal."""

from rich.markup import escape
from rich.table import Table

from ..checkup import BROKEN, DOUBTFUL, FINE, Diagnosis

STYLES = {FINE: "green", DOUBTFUL: "yellow", BROKEN: "bold red"}


def diagnosis_table(diagnosis: Diagnosis, title: str) -> Table:
    """What was looked at, verdict first; what to do stands under what was seen."""
    table = Table("verdict", "what", "seen, and what to do", title=escape(title), show_lines=True)
    for finding in diagnosis:
        advice = f"\n[bold]-> {escape(finding.advice)}[/]" if finding.advice else ""
        style = STYLES[finding.verdict]
        table.add_row(f"[{style}]{finding.verdict}[/]", escape(finding.name), escape(finding.seen) + advice)
    return table
