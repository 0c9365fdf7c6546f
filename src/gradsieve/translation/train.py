"""One training run, top to bottom: any method, from text to BLEU, and on from wherever it was stopped."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam

from ..runs.checkpoint import save_json
from ..runs.directory import RunDirectory
from ..runs.journal import Journal, Metrics
from ..runs.progress import Progress
from ..runs.signature import environment, signature
from ..runs.team import Team
from .evaluate import perplexity, translate
from .load import Text, load_text
from .methods import METHODS, Bench
from .model import build_translator
from .pairs import ENGLISH
from .recipe import ModelSettings, TranslationRecipe
from .score import score
from .stream import Slice, Stream
from .translator import Translator
from .vocabulary import Vocabulary

USAGE_TARGETS = 10_000
"""Targets, at most, over which the use of languages is averaged for the log."""


def train(
    recipe: TranslationRecipe,
    method: str,
    *,
    seed: int,
    data: Path | None,
    out: Path,
    resume: bool,
    device: torch.device,
    progress: Progress,
) -> dict[str, Any]:
    """Trains, measures and writes the run directory `out`; returns what result.json holds."""
    text = load_text(recipe, data)
    run = RunDirectory(out, recipe, method, seed, text.checksum, resume=resume)
    if run.result is not None:
        return run.result
    signed = signature(recipe, method, seed, text.checksum)
    setup = SetUp(recipe, method, text, seed, device)
    with run.opened(environment(device) | {"signature": signed}):
        for note in text.notes:
            progress.note(note)
        if run.team.first:
            text.vocabulary.save(out / "vocabulary")
            _describe(out / "languages.json", text)
        result: dict[str, Any] = {"recipe": recipe.name, "method": method, "seed": seed}
        result |= _trained(setup, run, progress)
        result |= {"signature": signed | {"metrics": setup.signatures}}
        run.finish(result)
    return result


def check(recipe: TranslationRecipe, method: str, *, data: Path | None, device: torch.device) -> None:
    """Raises what `train` would refuse, without training."""
    text = load_text(recipe, data)
    build_model(recipe.model, text.vocabulary)


class SetUp:
    """All that a run is made of, from recipe and seed."""

    def __init__(self, recipe: TranslationRecipe, method: str, text: Text, seed: int, device: torch.device):
        self.recipe, self.method, self.text, self.seed, self.device = recipe, method, text, seed, device
        torch.manual_seed(seed)
        self.model = build_model(recipe.model, text.vocabulary).to(device)
        self.optimizer = Adam(self.model.parameters(), lr=recipe.optimizer.lr)
        corpus = text.corpus
        bench = Bench(recipe, self.model, corpus.available, text.target, text.related, text.similarities, seed)
        self.way = METHODS[method](bench)
        self.team = Team()
        self.team.reseed(seed)
        self.stream = Stream(
            corpus,
            self.way,
            words=recipe.batch_words,
            batching=recipe.batching,
            pool=recipe.pool,
            seed=seed,
            device=device,
        )
        every = max(1, len(self.stream.items) // USAGE_TARGETS)
        self.sample = corpus.available[self.stream.items[::every]]
        texts, english = zip(*text.dev, strict=True)
        self.dev = text.vocabulary.encode(self.language, texts), text.vocabulary.encode(ENGLISH, english)
        sources, targets = corpus.pairs_of(self.language)
        some = torch.arange(0, len(sources), -(-len(sources) // len(text.dev)))
        self.steering = sources[some], corpus.targets[targets[some]]
        self.signatures: dict[str, str] = {}

    @property
    def language(self) -> str:
        return self.text.corpus.languages[self.text.target]

    def usage(self) -> dict[str, dict[str, float]]:
        """The share of each language in what is drawn now."""
        shares = self.way.probabilities(self.sample).mean(0).tolist()
        return {"usage": dict(zip(self.text.corpus.languages, shares, strict=True))}

    def evaluate_dev(self) -> Metrics:
        """BLEU comes first, where perplexity says that it means something yet."""
        found = perplexity(self.model, *self.dev, self.device)
        if found >= self.recipe.decode.bleu_below:
            return {"perplexity": found}
        return {"bleu": self._score(self.text.dev)[0]["bleu"], "perplexity": found}

    def evaluate_steering(self) -> dict[str, Metrics]:
        """On training sentences of the low-resource language, by whose gradient Algorithm 2 is steered; dev is not."""
        return {"steering": {"perplexity": perplexity(self.model, *self.steering, self.device)}}

    def evaluate_test(self, folder: Path, which: str) -> Metrics:
        """Scores the translations of the test set, and writes them down as ``test.WHICH``."""
        metrics, translations = self._score(self.text.test)
        write_lines(folder / f"test.{which}", translations)
        return metrics

    def _score(self, pairs: list[tuple[str, str]]) -> tuple[Metrics, list[str]]:
        texts, references = zip(*pairs, strict=True)
        found = translate(self.model, self.text.vocabulary, self.language, texts, self.recipe.decode, self.device)
        scores = score(found, references)
        self.signatures = scores.signatures
        return {"bleu": scores.bleu, "chrf": scores.chrf}, found


def _trained(setup: SetUp, run: RunDirectory, progress: Progress) -> dict[str, Any]:
    """The loop."""
    recipe, way, model, optimizer = setup.recipe, setup.way, setup.model, setup.optimizer
    journal = Journal(
        run,
        recipe,
        {"model": model, "optimizer": optimizer, "method": way, "stream": setup.stream},
        evaluated=model,
        evaluate_dev=setup.evaluate_dev,
        evaluate_more=setup.evaluate_steering,
        better=preferred,
        device=setup.device,
        progress=progress,
    )
    step = journal.begin(f"{setup.method}, seed {setup.seed}")
    parameters = list(model.parameters())
    batches, times = iter(setup.stream), journal.times
    while step < recipe.steps:
        with times.part("data"):
            slices = next(batches)
        optimizer.zero_grad()
        losses = []
        for part in slices:
            with times.part("loss"):
                loss = way.loss(part.batch)
            with times.part("update"):
                gradients = torch.autograd.grad(loss, parameters)
            if way.observes:
                with times.part("method"):
                    way.observe(part.group, gradients)
            with times.part("update"):
                accumulate(parameters, gradients, part)
            losses.append(loss.detach() * part.share)
        with times.part("update"):
            setup.team.average([p.grad for p in parameters if p.grad is not None])
            nn.utils.clip_grad_norm_(parameters, recipe.optimizer.clip)
            optimizer.step()
        with times.part("method"):
            record = way.step()
        step += 1
        journal.after_step(step, torch.stack(losses).sum(), record, figures=setup.usage)

    if (scorer := getattr(way, "scorer", None)) is not None:
        run.save_tensors("final/scorer", scorer.state_dict())
    folder = run.path / "translations"
    for name, side in (("source", 0), ("reference", 1)) if run.team.first else ():
        write_lines(folder / f"test.{name}", [pair[side] for pair in setup.text.test])
    result = journal.result(lambda which: setup.evaluate_test(folder, which))
    if result["best_step"] == recipe.steps and run.team.first:
        shutil.copyfile(folder / "test.last", folder / "test.best")
    return result | {"skipped": getattr(way, "skipped", 0)}


def accumulate(parameters: list[nn.Parameter], gradients: tuple[Tensor, ...], part: Slice) -> None:
    """Adds the slice's share of the batch's gradient to ``.grad``."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if part.share == 1:
            parameter.grad = gradient
        elif parameter.grad is None:
            parameter.grad = gradient * part.share
        else:
            parameter.grad.add_(gradient, alpha=part.share)


def preferred(new: Metrics, old: Metrics) -> bool:
    """The authors' choice of a model: by BLEU, and by perplexity while that is too high for BLEU to mean anything."""
    if "bleu" in new and "bleu" in old:
        return new["bleu"] >= old["bleu"]
    if "bleu" in new or "bleu" in old:
        return "bleu" in new
    return new["perplexity"] <= old["perplexity"]


def build_model(settings: ModelSettings, vocabulary: Vocabulary) -> Translator:
    sizes = settings.model_dump(exclude={"name", "label_smoothing"})
    return build_translator(settings.name, vocabulary.source_size, vocabulary.target_size, **sizes)


def write_lines(path: Path, lines: list[str]) -> None:
    """One sentence a line, whatever is in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(" ".join(line.split()) + "\n" for line in lines), encoding="utf-8")


def _describe(file: Path, text: Text) -> None:
    corpus = text.corpus
    save_json(
        file,
        {
            "languages": corpus.languages,
            "target": corpus.languages[text.target],
            "related": corpus.languages[text.related],
            "similarities": text.similarities.tolist(),
            "targets": len(corpus),
            "pairs": [len(sources) for sources in corpus.sources],
            "notes": text.notes,
        },
    )
