"""Translation runs: which languages they use, how these agree, and what comes out."""

from collections.abc import Mapping, Sequence
from typing import Any

from .curves import binned, points_each, rounded
from .read import Run

SENTENCES = 16
"""Test sentences that are shown."""


def usage(run: Run) -> list[dict[str, Any]]:
    """Share of each language in what is drawn, in per cent, by step (Figures 5 and 6)."""
    lines = [line for line in run.lines if isinstance(line.get("usage"), Mapping)]
    names = list(lines[0]["usage"]) if lines else []
    return _by_language(run, {n: {line["step"]: 100 * line["usage"].get(n, 0.0) for line in lines} for n in names})


def agreement(run: Run) -> list[dict[str, Any]]:
    """Agreement of each language's gradient with the target language's, a cosine, by step.

    The target's with itself says nothing and is left out, and so is the first update, before which none was seen.
    """
    about = run.optional("languages.json")
    names, target = about.get("languages", []), about.get("target")
    lines = [line for line in run.lines if any(line.get("rewards") or ()) and len(line["rewards"]) == len(names)]
    series = {
        name: {line["step"]: line["rewards"][i] for line in lines if line["rewards"][i] is not None}
        for i, name in enumerate(names)
        if name != target
    }
    return _by_language(run, series) if lines else []


def _by_language(run: Run, series: Mapping[str, Mapping[int, float]]) -> list[dict[str, Any]]:
    steps, rows = binned([dict(own) for own in series.values()], run.steps, points_each(len(series) * 40))
    return [
        {"language": name, "step": steps, "value": rounded(row)}
        for name, row in zip(series, rows, strict=True)
        if steps
    ]


def samples(variants: Mapping[str, Run]) -> list[dict[str, Any]]:
    """Test sentences, evenly spaced and chosen by nothing else: source, reference and each method's translation."""
    texts = {name: _test_lines(run, "best") for name, run in variants.items()}
    texts = {name: lines for name, lines in texts.items() if lines}
    if not texts:
        return []
    some = variants[next(iter(texts))]
    sources, references = _test_lines(some, "source"), _test_lines(some, "reference")
    count = min(len(lines) for lines in (sources, references, *texts.values()))
    places = dict.fromkeys(round(i * (count - 1) / (SENTENCES - 1)) for i in range(SENTENCES)) if count else {}
    return [
        {
            "source": sources[place],
            "reference": references[place],
            "translations": {name: lines[place] for name, lines in texts.items()},
        }
        for place in places
    ]


def bleu_interval(run: Run) -> float | None:
    """Half of the 95% interval of BLEU over test sentences, by sacreBLEU's bootstrap; None where it cannot be had."""
    hypotheses, references = _test_lines(run, "best"), _test_lines(run, "reference")
    if len(hypotheses) < 2 or len(hypotheses) != len(references):
        return None
    from sacrebleu.metrics.bleu import BLEU

    score = BLEU().corpus_score(hypotheses, [references], n_bootstrap=1000)
    half = getattr(score, "_ci", None)
    return None if half is None or half < 0 else float(half)


def _test_lines(run: Run, which: str) -> Sequence[str]:
    file = run.path / f"translations/test.{which}"
    return file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if file.is_file() else []
