"""A small causal language model of Galician names, trained on five sources: GroupDDS finds out how to mix them.

Real text, from the installed pycountry: names of languages, countries and currencies in Galician (few), Portuguese,
Spanish, Hungarian and Polish (many). The model is a GPT-2 made from a config that reads letters; nothing is downloaded.
Each source is a data set; the target is a dev set of Galician names that is never trained on.

python examples/hf_domain_mixing.py
"""

import gettext
import random
import time
from collections.abc import Callable
from typing import Any

import pycountry
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from gradsieve import GroupDDS
from gradsieve.integrations.per_example import causal_lm_losses

SOURCES = ("gl", "pt", "es", "hu", "pl")
LETTERS, LENGTH, BATCH = 400, 24, 32
DEV_SIZE, TEST_SIZE, OWN_SIZE = 150, 400, 150  # of Galician
DEV = len(SOURCES)
AVAILABLE = torch.tensor([1] * len(SOURCES) + [0])  # a step may take any source, but not the dev set


def names(language: str) -> list[str]:
    """Names of languages, countries and currencies, as far as they are translated at all."""
    found: set[str] = set()
    databases = {"iso639-3": pycountry.languages, "iso3166-1": pycountry.countries, "iso4217": pycountry.currencies}
    for domain, things in databases.items():
        catalogue = gettext.translation(domain, pycountry.LOCALES_DIR, languages=[language])
        found |= {catalogue.gettext(thing.name) for thing in things} - {thing.name for thing in things}
    return sorted(found)


def load() -> tuple[list[Tensor], Tensor, Tensor]:
    """The sources, the dev set and the test set: (N, LENGTH) each, 1 begins and ends a name, 0 is padding."""
    texts = {language: names(language) for language in SOURCES}
    letters = {letter: 2 + i for i, letter in enumerate(sorted({x for t in texts.values() for x in "".join(t)}))}

    def rows(chosen: list[str]) -> Tensor:
        ids = [[1, *(letters[letter] for letter in text), 1][:LENGTH] for text in chosen]
        return torch.tensor([row + [0] * (LENGTH - len(row)) for row in ids])

    random.Random(0).shuffle(texts["gl"])
    dev, test = texts["gl"][:DEV_SIZE], texts["gl"][DEV_SIZE : DEV_SIZE + TEST_SIZE]
    texts["gl"] = texts["gl"][DEV_SIZE + TEST_SIZE :][:OWN_SIZE]
    held_out = {*dev, *test}
    sources = [rows([text for text in texts[language] if text not in held_out]) for language in SOURCES]
    return sources, rows(dev), rows(test)


def losses(model: GPT2LMHeadModel, rows: Tensor) -> Tensor:
    """One per name: nats for each letter."""
    mask = rows > 0
    logits = model(input_ids=rows, attention_mask=mask.long()).logits
    assert logits is not None
    return causal_lm_losses(logits, torch.where(mask, rows, -100))


def train(mix: Tensor | None, seed: int, steps: int, log: Callable[[str], None]) -> float:
    """Test loss after training with fixed shares of the sources, or with those that GroupDDS learns."""
    torch.manual_seed(seed)
    sources, dev, test = load()
    size: dict[str, Any] = {"vocab_size": LETTERS, "n_positions": LENGTH, "n_embd": 48, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=1, eos_token_id=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    dds = GroupDDS(None, num_groups=DEV + 1, target_group=DEV, items_between=10, updates=5, decay=(0.9, 1.0))
    dds.scorer_optimizer.param_groups[0]["lr"] = 3e-3  # the paper's 0.0001 is for weeks of training

    def gradients(rows: Tensor) -> list[Tensor]:
        optimizer.zero_grad()
        losses(model, rows[torch.randint(len(rows), (BATCH,))]).mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for step in range(steps):
        if mix is None:
            group = int(dds.draw(AVAILABLE))
            dds.observe(DEV, gradients(dev))
            dds.observe(group, gradients(sources[group]))
        else:
            group = int(torch.multinomial(mix, 1))
            gradients(sources[group])
        optimizer.step()
        record = dds.step()
        if record is not None and (step + 1) % (steps // 4) < 10:
            shares = zip(SOURCES, record.probabilities.tolist(), strict=False)
            log(f"  step {step + 1}: " + ", ".join(f"{source} {share:.0%}" for source, share in shares))
    model.eval()
    with torch.no_grad():
        return float(losses(model, test).mean())


def main(steps: int = 200, seeds: int = 2) -> dict[str, float]:
    """Nats for each letter of the Galician test names by way of mixing, mean over the seeds."""
    sizes = torch.tensor([float(len(source)) for source in load()[0]])
    print("names: " + ", ".join(f"{source} {int(size)}" for source, size in zip(SOURCES, sizes, strict=True)))
    mixes = {
        "Galician only": (torch.arange(len(SOURCES)) == 0).float(),
        "equal shares": torch.ones(len(SOURCES)),
        "proportional": sizes,
        "temperature 5": sizes**0.2,
        "GroupDDS": None,
    }
    found = {}
    for name, mix in mixes.items():
        start = time.perf_counter()
        runs = [train(mix, seed, steps, print if seed == 0 else lambda _: None) for seed in range(seeds)]
        found[name] = sum(runs) / seeds
        seconds = (time.perf_counter() - start) / seeds
        print(
            f"{name:15} {found[name]:.3f} nats a letter ({', '.join(f'{r:.3f}' for r in runs)}), {seconds:.0f} s a run"
        )
    return found


if __name__ == "__main__":
    main()
