"""`gradsieve doctor` for translation: can Algorithm 2 learn anything from these languages?"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ..checkup import BROKEN, DOUBTFUL, FINE, Diagnosis, Finding
from ..checkup.overlap import check_overlap, fingerprint
from ..errors import GradsieveError
from ..randomness import seeded
from ..resample import GroupDDS
from ..runs.progress import duration
from .load import Text, load_text
from .pairs import ENGLISH
from .ragged import Ragged
from .recipe import TranslationRecipe
from .stream import batch_of, on_device
from .train import SetUp, accumulate

LEARNED = ("dds", "tcs+dds")
STEPS = 10
PARTS = 2
"""Batches of a language that make a gradient: as many as the decay remembers. Two gradients of each are compared."""
FEW_SHARED, FEW_UPDATES = 0.05, 20


def examine(
    recipe: TranslationRecipe,
    method: str,
    *,
    data: Path | None,
    device: torch.device,
    on_rows: Callable[[int, int], None] = lambda done, total: None,
) -> Diagnosis:
    """What can be said before training: languages to choose from, agreement of gradients, updates, overlap, cost."""
    if method not in LEARNED:
        choice = " or ".join(LEARNED)
        raise GradsieveError(f"the doctor examines DDS; {method} has no scorer. Choose --method {choice}.")
    text = load_text(recipe, data)
    setup = SetUp(recipe, method, text, 0, device)
    way = setup.way
    assert isinstance(way, GroupDDS)
    findings = [check_choice(text)]
    plain, dds, sentences = _stepped(setup)
    findings += [check_agreement(setup), check_updates(recipe, way, sentences), check_pairs(text, on_rows)]
    findings.append(_cost(setup, way, plain, dds))
    return Diagnosis(tuple(findings), plain, dds)


def check_choice(text: Text) -> Finding:
    """Algorithm 2 draws a language for each English sentence: some must have several."""
    several = float((text.corpus.available.sum(1) > 1).float().mean())
    pairs = ", ".join(f"{n} {len(s):,}" for n, s in zip(text.corpus.languages, text.corpus.sources, strict=True))
    seen = f"{several:.0%} of {len(text.corpus):,} English sentences have sources in several languages ({pairs} pairs)."
    if several >= FEW_SHARED:
        return Finding("languages", FINE, seen)
    advice = "The scorer chooses among the languages of a sentence: bring text that shares its English sides."
    return Finding("languages", BROKEN if several == 0 else DOUBTFUL, seen, advice)


def check_agreement(setup: SetUp) -> Finding:
    """Cosine of each language's gradient with the low-resource one's, twice, from other sentences."""
    corpus, target = setup.text.corpus, setup.text.target
    cosines = []
    for number in range(2):
        own = _gradient(setup, target, f"reference {number}")
        each = [_gradient(setup, group, f"sample {number}") for group in range(len(corpus.languages))]
        cosines.append(torch.stack([torch.cosine_similarity(own, its, dim=0) for its in each]))
    first, second = cosines
    mean = (first + second) / 2  # (n,)
    listed = ", ".join(f"{n} {c:.2f}" for n, c in zip(corpus.languages, mean.tolist(), strict=True))
    noise, spread = float((first - second).abs().mean()), float(mean.std(correction=0))
    seen = (
        f"gradients of {PARTS} batches, after {STEPS} steps, agree with those of {setup.language} by cosines of "
        f"{listed}; measured anew they differ by {noise:.3f}, languages among each other by {spread:.3f}."
    )
    if not bool(mean.isfinite().all()):
        return Finding("agreement", BROKEN, seen, "Lower the learning rate: the gradients are not finite.")
    if spread >= noise:
        return Finding("agreement", FINE, seen)
    advice = "So early that is usual; the scorer sees as much noise as signal. Take larger batches (batch_words)."
    return Finding("agreement", DOUBTFUL, seen, advice)


def check_updates(recipe: TranslationRecipe, way: GroupDDS, sentences: float) -> Finding:
    count = int(recipe.steps * sentences / way.items_between)
    seen = (
        f"{recipe.steps:,} steps of about {sentences:.0f} sentences, an update of the scorer every "
        f"{way.items_between:,}: {count:,} updates of {way.updates} step{'s' * (way.updates > 1)}."
    )
    if count >= FEW_UPDATES:
        return Finding("updates", FINE, seen)
    advice = "The scorer hardly learns: lower dds.items_between (tcs_dds.items_between), or train longer."
    return Finding("updates", DOUBTFUL if count else BROKEN, seen, advice)


def check_pairs(text: Text, on_rows: Callable[[int, int], None]) -> Finding:
    """Pairs of dev that also stand in the training text of the low-resource language."""
    language = text.corpus.languages[text.target]
    sources, english = zip(*text.dev, strict=True)
    dev = _fingerprints(text.vocabulary.encode(language, sources), text.vocabulary.encode(ENGLISH, english))
    own, targets = text.corpus.pairs_of(language)
    train = _fingerprints(own, text.corpus.targets[targets])
    return check_overlap(
        dev, _told(train, len(own), on_rows), "sentence pairs of dev", f"the training text of {language}"
    )


def _fingerprints(sources: Ragged, targets: Ragged) -> Iterator[bytes]:
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        yield fingerprint(repr((source, target)).encode())


def _told(items: Iterator[bytes], total: int, on_rows: Callable[[int, int], None]) -> Iterator[bytes]:
    for done, item in enumerate(items, 1):
        yield item
        if done % 1000 == 0 or done == total:
            on_rows(done, total)


def _stepped(setup: SetUp) -> tuple[float, float, float]:
    """Seconds of a training step without what DDS adds to it, and with it, medians; and sentences in a step."""
    parameters, batches, times, sentences = list(setup.model.parameters()), iter(setup.stream), [], 0
    for _ in range(STEPS):
        slices, start, added = next(batches), time.perf_counter(), 0.0
        setup.optimizer.zero_grad()
        for part in slices:
            gradients = torch.autograd.grad(setup.way.loss(part.batch), parameters)
            before = _now(setup.device)
            setup.way.observe(part.group, gradients)
            added += _now(setup.device) - before
            accumulate(parameters, gradients, part)
            sentences += len(part.batch.source)
        nn.utils.clip_grad_norm_(parameters, setup.recipe.optimizer.clip)
        setup.optimizer.step()
        whole = _now(setup.device) - start
        times.append((whole - added, whole))
    plain, dds = (sorted(column)[STEPS // 2] for column in zip(*times, strict=True))
    return plain, dds, sentences / STEPS


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _gradient(setup: SetUp, group: int, purpose: str) -> Tensor:
    """Of some sentences of a language, drawn at random, (P,)."""
    corpus, generator = setup.text.corpus, seeded(0, "doctor", group, purpose)
    sources, targets = corpus.sources[group], corpus.source_targets[group]
    pieces = float((sources.lengths + corpus.targets.lengths[targets]).float().mean())
    size, total = max(1, int(setup.recipe.batch_words / pieces)), torch.zeros(())
    for _ in range(PARTS):
        rows = torch.randint(len(sources), (size,), generator=generator)
        batch = on_device(batch_of(sources[rows], corpus.targets[targets[rows]]), setup.device)
        found = torch.autograd.grad(setup.way.loss(batch), list(setup.model.parameters()))
        total = total + torch.cat([g.flatten() for g in found]).cpu()
    return total


def _cost(setup: SetUp, way: GroupDDS, plain: float, dds: float) -> Finding:
    parameters = sum(p.numel() for p in setup.model.parameters())
    stored = way.num_groups * (way.store.projection or parameters) * way.store.dtype.itemsize
    seen = (
        f"a step takes {1000 * dds:.3g} ms, {dds / plain:.2f} times the {1000 * plain:.3g} ms of a plain one; "
        f"{setup.recipe.steps:,} steps about {duration(setup.recipe.steps * dds)}, evaluation not counted. "
        f"Gradients of {way.num_groups} languages take {stored / 1e6:.3g} MB."
    )
    return Finding("cost", FINE, seen)
