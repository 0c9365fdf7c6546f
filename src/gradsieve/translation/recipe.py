"""What a recipe for translation may say. The defaults are the paper's and its authors' code's."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..runs.recipe import Count, NotNegative, Positive, Recipe, Settings, Share, SPCLSettings
from .pairs import LIMITS


class DataSettings(Settings):
    name: Literal["files", "demo"] = "files"
    """``files``: train.xx-en.tsv and the like in --data. ``demo``: names of places and languages, from pycountry."""
    target: str
    """The low-resource language: the one to translate from."""
    languages: tuple[str, ...] = ()
    """Those to train on; by default all that have training data."""
    related: str | None = None
    """The relative of `target`, for the method ``related``; by default the one that looks most like it."""
    pieces: Count = 8000
    """Of each source language, and of English."""
    max_words: Count = LIMITS.max_words
    max_ratio: Annotated[Positive, Field(ge=1)] = LIMITS.max_ratio
    cache: Path | None = None
    """Keeps vocabularies and similarities for the next run; by default a folder of the user's."""


class ModelSettings(Settings):
    name: Literal["lstm", "transformer"] = "lstm"
    hidden: Count = 512
    embedding: Count = 128
    """Of the LSTM; a Transformer's have the size of its hidden layers."""
    dropout: Annotated[Share, Field(lt=1)] = 0.3
    layers: Count = 3
    """Of the Transformer; the LSTM has one."""
    heads: Count = 4
    label_smoothing: Annotated[Share, Field(lt=1)] = 0.0


class OptimizerSettings(Settings):
    lr: Positive = 1e-3
    """Of Adam."""
    clip: Positive = 5.0
    """Longest gradient."""


class GroupSettings(Settings):
    lr: Positive = 1e-4
    """Of psi's Adam."""
    items_between: Count = 20_000
    """K."""
    updates: Count = 1
    """E."""
    batch_size: Count = 160
    """B."""
    decay_old: Share = 0.5
    """alpha_1."""
    decay_new: Positive = 1.0
    """alpha_2."""
    cosine: bool = True
    reward_scale: Positive = 0.001
    psi_gradient: Literal["algorithm2", "expectation"] = "algorithm2"
    store: Literal["float32", "bfloat16"] = "float32"
    projection: Count | None = None
    """Length of a random projection that is stored instead of whole gradients."""
    prior_passes: Count = 20
    prior_lr: Positive = 1e-3


class TCSSettings(Settings):
    temperature: Positive = 0.1
    """The lower, the more of what looks most like the low-resource language."""
    most_frequent: Count = 10_000
    """Character n-grams, of one to four characters, that languages are compared by."""


class DecodeSettings(Settings):
    beam: Count = 5
    length_penalty: NotNegative = 1.0
    max_ratio: Positive = 2.0
    """Longest translation over its source, in pieces."""
    bleu_below: Positive = 20.0
    """Dev perplexity below which dev BLEU chooses the model; above it, perplexity does."""


class TranslationRecipe(Recipe):
    batch_words: Count = 1500
    """Pieces of source and target in a batch."""
    batching: Literal["language", "mixed"] = "language"
    """``language``: a batch has one source language, so that its gradient is that of it. ``mixed``: it has what was
    drawn, and a method that observes gradients takes one backward pass for each language in it."""
    pool: Count = 2000
    """Sentences that are drawn at once and then sorted into batches."""
    data: DataSettings
    model: ModelSettings = ModelSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    dds: GroupSettings = GroupSettings()
    tcs_dds: GroupSettings = GroupSettings(updates=100, reward_scale=0.01)
    tcs: TCSSettings = TCSSettings()
    spcl: SPCLSettings = SPCLSettings()
    decode: DecodeSettings = DecodeSettings()

    @model_validator(mode="after")
    def _languages_are_named_once(self) -> "TranslationRecipe":
        names = self.data.languages
        if len(set(names)) < len(names):
            raise ValueError(f"data.languages names one twice: {', '.join(names)}")
        return self
