"""BLEU and chrF with their signatures, and the paired bootstrap."""

import random

import pytest
import sacrebleu

from gradsieve import GradsieveError
from gradsieve.translation.score import paired_bootstrap, score

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "watch",
    "from",
    "their",
    "tower",
]


def sentences(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(5, 12))) for _ in range(count)]


def worsened(texts: list[str], share: float, seed: int) -> list[str]:
    chance = random.Random(seed)
    return [" ".join("wrong" if chance.random() < share else word for word in text.split()) for text in texts]


def test_scores_are_sacrebleus_own_and_carry_its_signatures() -> None:
    references = sentences(40)
    hypotheses = worsened(references, 0.2, 1)
    found = score(hypotheses, references)
    assert found.bleu == sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert found.chrf == sacrebleu.corpus_chrf(hypotheses, [references]).score
    assert "tok:13a" in found.signatures["bleu"]
    assert "nc:6" in found.signatures["chrf"]
    assert sacrebleu.__version__ in found.signatures["bleu"]
    assert score(references, references).bleu == pytest.approx(100)


def test_the_bootstrap_tells_a_real_difference_from_a_chance_one() -> None:
    references = sentences(300)
    systems = {
        "uniform": worsened(references, 0.30, 1),
        "better": worsened(references, 0.15, 2),
        "alike": worsened(references, 0.30, 4),
    }
    found = paired_bootstrap(systems, references, "uniform", samples=200)
    assert set(found) == {"better", "alike"}
    assert found["better"]["bleu"] < 0.01
    assert found["better"]["chrf"] < 0.01
    assert found["alike"]["bleu"] > 0.05
    assert found == paired_bootstrap(systems, references, "uniform", samples=200)
    assert paired_bootstrap({"uniform": references}, references, "uniform") == {}


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(GradsieveError, match="2 translations cannot be scored against 3 references"):
        score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(GradsieveError, match="0 references"):
        score([], [])
