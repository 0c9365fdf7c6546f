"""What was trained, on what, with what."""

from collections.abc import Mapping
from typing import Any

from .read import Run


def facts(run: Run) -> list[tuple[str, str]]:
    """Of a run, what all runs of its experiment share."""
    found = _translation(run) if run.recipe["task"] == "translation" else _images(run)
    environment = run.optional("environment.json")
    machine = [environment.get("device"), f"torch {environment['torch']}" if "torch" in environment else None]
    signature = environment.get("signature", {})
    if signature.get("gradsieve"):
        machine.append(f"gradsieve {signature['gradsieve']} ({signature.get('commit') or 'no commit'})")
    return [(term, text) for term, text in [*found, ("Made with", _list(machine))] if text]


def _images(run: Run) -> list[tuple[str, str]]:
    recipe, sizes = run.recipe, run.about.get("sizes", {})
    data, damage, model = (_section(recipe, key) for key in ("data", "damage", "model"))
    names = {"train": "for training", "dev": "dev", "dev_holdout": "dev held out", "test": "test"}
    counts = [f"{sizes[key]:,} {name}" for key, name in names.items() if sizes.get(key)]
    classes = run.about.get("classes", [])
    return [
        ("Data", _list([_text(data, "name"), *counts, f"{len(classes)} classes" if classes else None])),
        ("Damage", _damage(damage)),
        ("Model", _list([_text(model, "name"), _optimizer(recipe)])),
        ("Budget", f"{run.steps:,} steps of {recipe.get('batch_size', '?')} examples"),
        ("Scorer", _scorer(recipe)),
    ]


def _translation(run: Run) -> list[tuple[str, str]]:
    recipe, about = run.recipe, run.optional("languages.json")
    names, pairs = about.get("languages", []), about.get("pairs", [])
    counts = [f"{name} {count:,}" for name, count in zip(names, pairs, strict=False)]
    model = _section(recipe, "model")
    sizes = [f"{key} {model[key]}" for key in ("hidden", "embedding") if key in model]
    return [
        ("Task", f"{about['target']} to English" if "target" in about else "to English"),
        ("Data", f"pairs: {', '.join(counts)}" if counts else ""),
        ("Closest", f"{about['related']}, by character n-grams" if "related" in about else ""),
        ("Model", _list([_text(model, "name"), *sizes, _optimizer(recipe)])),
        ("Budget", f"{run.steps:,} steps of about {recipe.get('batch_words', '?')} words"),
    ]


def _damage(damage: Mapping[str, Any]) -> str:
    kind = damage.get("kind", "none")
    if kind == "long-tail":
        return f"long tail, largest class {damage.get('factor', 0):g} times the smallest"
    return "" if kind == "none" else f"{damage.get('share', 0):.0%} of the training labels made wrong ({kind})"


def _scorer(recipe: Mapping[str, Any]) -> str:
    scorer, dds = _section(recipe, "scorer"), _section(recipe, "dds")
    bound = f"scores within ±{dds['max_logit']:g}" if dds.get("max_logit") else None
    caution = f"caution {dds['caution']:g}" if dds.get("caution") is not None else None
    return _list([_text(scorer, "kind"), f"lr {scorer['lr']:g}" if "lr" in scorer else None, bound, caution])


def _optimizer(recipe: Mapping[str, Any]) -> str:
    settings = _section(recipe, "optimizer")
    return " ".join(str(part) for part in (settings.get("name", "adam"), "lr", settings.get("lr", "?")))


def _section(recipe: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = recipe.get(key)
    return found if isinstance(found, Mapping) else {}


def _text(section: Mapping[str, Any], key: str) -> str:
    return str(section.get(key, ""))


def _list(parts: list[Any]) -> str:
    return ", ".join(str(part) for part in parts if part)
