"""Which language is a name in? A small BERT learns it from names of which 40% carry a wrong label.

Real text, from the installed pycountry: names of languages and countries in six languages. The model is made from a
config and reads pairs of letters; nothing is downloaded. Beside DDSTrainer: the Trainer, the Trainer that also gets the
clean dev examples, and the Trainer with all labels right, which shows what there is to gain.

python examples/hf_noisy_labels.py
"""

import gettext
import random
import tempfile
import time
from itertools import pairwise
from typing import Any

import pycountry
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

LANGUAGES = ("de", "fr", "hu", "nl", "pl", "tr")
LENGTH, WRONG = 16, 0.4
TRAIN, DEV, TEST = 300, 30, 150  # for each language

Example = dict[str, Any]


def names(language: str) -> list[str]:
    """Names of languages and countries, as far as they are translated at all."""
    found: set[str] = set()
    for domain, things in (("iso639-3", pycountry.languages), ("iso3166-1", pycountry.countries)):
        catalogue = gettext.translation(domain, pycountry.LOCALES_DIR, languages=[language])
        found |= {catalogue.gettext(thing.name) for thing in things} - {thing.name for thing in things}
    return sorted(found)


def pairs(text: str) -> list[str]:
    """Of letters: what the model reads as its words."""
    return [a + b for a, b in pairwise(f" {text.lower()} ")]


def load(seed: int = 0, wrong: float = WRONG) -> tuple[list[Example], list[Example], list[Example]]:
    """Training set with wrong labels, clean dev and test sets."""
    chance, damage = random.Random(seed), random.Random(seed + 1)
    texts = {language: names(language) for language in LANGUAGES}
    numbers = {pair: 2 + i for i, pair in enumerate(sorted({x for t in texts.values() for n in t for x in pairs(n)}))}

    def example(text: str, label: int) -> Example:
        ids = [1, *(numbers[pair] for pair in pairs(text))][:LENGTH]
        rest = LENGTH - len(ids)
        mask = [1] * len(ids) + [0] * rest
        return {"input_ids": ids + [0] * rest, "attention_mask": mask, "labels": label}

    parts: tuple[list[Example], list[Example], list[Example]] = ([], [], [])
    for label, language in enumerate(LANGUAGES):
        chosen = chance.sample(texts[language], TRAIN + DEV + TEST)
        for number, text in enumerate(chosen):
            which = 0 if number < TRAIN else 1 if number < TRAIN + DEV else 2
            shift = damage.randrange(1, len(LANGUAGES)) if which == 0 and damage.random() < wrong else 0
            parts[which].append(example(text, (label + shift) % len(LANGUAGES)))
    return parts


def new_model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    labels: dict[str, Any] = {"num_labels": len(LANGUAGES)}
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=4000,
            hidden_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=96,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **labels,
        )
    )


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": 100 * float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def plain(args: TrainingArguments, train: Any, dev: Any, test: Any) -> Trainer:
    return Trainer(
        new_model(),
        args,
        data_collator=default_data_collator,
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=accuracy,
    )


def with_dds(args: TrainingArguments, train: Any, dev: Any, test: Any) -> Trainer:
    from gradsieve.integrations.hf import DDSTrainer

    return DDSTrainer(
        new_model(),
        args,
        data_collator=default_data_collator,
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=accuracy,
        dds_dev_dataset=dev,
    )


def main(epochs: int = 8) -> dict[str, float]:
    """Test accuracy in per cent by method."""
    train, dev, test = load()
    found = {}
    runs = {
        "right labels": (plain, load(wrong=0)[0]),
        "plain": (plain, train),
        "plain, dev too": (plain, train + dev),
        "DDS": (with_dds, train),
    }
    for name, (run, data) in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                folder,
                num_train_epochs=epochs,
                per_device_train_batch_size=32,
                learning_rate=3e-3,
                per_device_eval_batch_size=300,
                logging_strategy="epoch",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                log_level="error",
                dataloader_pin_memory=False,
            )
            start = time.perf_counter()
            trainer = run(args, data, dev, test)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        seconds = time.perf_counter() - start
        found[name] = trainer.evaluate()["eval_accuracy"]
        print(f"{name:15} {found[name]:.1f}% of {len(test)} test names after {epochs} epochs, {seconds:.0f} s")
    return found


if __name__ == "__main__":
    main()
