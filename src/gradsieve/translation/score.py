"""BLEU and chrF by sacreBLEU on detokenized text, with its signatures, and its paired bootstrap."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

from ..errors import GradsieveError

SAMPLES = 1000
"""Of the bootstrap, as sacreBLEU's own default."""


@dataclass(frozen=True)
class Scores:
    bleu: float
    chrf: float
    signatures: dict[str, str]
    """By metric: what a reader needs to compute the same number."""


def score(hypotheses: Sequence[str], references: Sequence[str]) -> Scores:
    """Of a whole corpus."""
    if len(hypotheses) != len(references) or not references:
        raise GradsieveError(f"{len(hypotheses)} translations cannot be scored against {len(references)} references.")
    metrics = _metrics()
    found = {name: metric.corpus_score(hypotheses, [references]).score for name, metric in metrics.items()}
    return Scores(found["bleu"], found["chrf"], {name: str(m.get_signature()) for name, m in metrics.items()})


def paired_bootstrap(
    systems: Mapping[str, Sequence[str]], references: Sequence[str], base: str, samples: int = SAMPLES
) -> dict[str, dict[str, float]]:
    """p-values of each system's difference from `base`, by system and metric (Koehn, 2004)."""
    others = [name for name in systems if name != base]
    if not others:
        return {}
    logging.getLogger("sacrebleu").setLevel(logging.WARNING)
    named: list[tuple[str, Sequence[str]]] = [(name, systems[name]) for name in (base, *others)]
    test = PairedTest(named, _metrics(), [list(references)], test_type="bs", n_samples=samples)
    _, table = test()
    columns: dict[str, list[Any]] = {metric: table[title] for metric, title in (("bleu", "BLEU"), ("chrf", "chrF2"))}
    return {name: {m: column[i].p_value for m, column in columns.items()} for i, name in enumerate(others, 1)}


def bootstrap_runs(runs: Mapping[str, Sequence[Path]], base: str) -> dict[str, tuple[float, ...]]:
    """p of each method's BLEU against that of `base`, seed by seed, by the translations that dev's choice made."""
    found: dict[str, tuple[float, ...]] = dict.fromkeys(runs, ())
    for number in range(len(runs[base])):
        systems = {method: _lines(folders[number] / "test.best") for method, folders in runs.items()}
        p_values = paired_bootstrap(systems, _lines(runs[base][number] / "test.reference"), base)
        for method, its in p_values.items():
            found[method] += (its["bleu"],)
    return found


def _lines(file: Path) -> list[str]:
    return (file.parent / "translations" / file.name).read_text(encoding="utf-8").split("\n")[:-1]


def _metrics() -> dict[str, Metric]:
    return {"bleu": BLEU(), "chrf": CHRF()}
