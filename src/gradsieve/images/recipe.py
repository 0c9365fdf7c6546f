"""What a recipe for images may say. The defaults are here; a recipe's TOML file holds what differs from them."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..runs.recipe import Count, NotNegative, Number, Positive, PositiveShare, Recipe, Settings, Share, SPCLSettings
from ..scorer import MAX_LOGIT, SCORER_LR

Reward = Literal["finite_difference", "jvp", "per_example"]
DevMode = Literal["train", "eval"]


class DataSettings(Settings):
    name: Literal["digits", "cifar10", "images"]
    """``images``: class folders, WebDataset shards, Parquet or a Hugging Face data set on disk."""
    setting: Literal["4k", "10pct", "full"] = "full"
    held_out: bool = False
    """Measure on training images that were set aside, not on the test set: for choosing settings."""
    format: Literal["auto", "folder", "shards", "table"] = "auto"
    size: Count = 224
    """Pixels of the square that is cut from each image."""
    image_column: str | None = None
    label_column: str | None = None
    workers: Annotated[int, Field(strict=True, ge=0)] = 0
    """Processes that read ahead."""


class DamageSettings(Settings):
    kind: Literal["none", "uniform", "flip", "long-tail"] = "none"
    share: Share = 0.4
    """Of the labels, for uniform and flip noise."""
    factor: Annotated[Number, Field(ge=1)] = 100.0
    """Largest class over smallest, for the long tail."""


class ModelSettings(Settings):
    name: str
    """``mlp``, ``small-cnn``, ``wrn-28-2``, ``resnet50``, ..., or ``module:function``."""
    channels_last: bool = False
    compile: bool = False
    precision: Literal["float32", "bf16"] = "float32"


class OptimizerSettings(Settings):
    name: Literal["sgd", "adam"] = "sgd"
    lr: Positive = 0.1
    momentum: Share = 0.9
    nesterov: bool = False
    weight_decay: NotNegative = 2e-4
    warmup: Annotated[int, Field(strict=True, ge=0)] = 0
    """Steps in which the learning rate climbs from 0."""
    cosine: bool = True
    """Whether it then falls to 0 along a half cosine; else it stays."""
    average: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Rate of the moving average of parameters and BatchNorm statistics that is evaluated; 0 for none."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> "OptimizerSettings":
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class ScorerSettings(Settings):
    kind: Literal["signal", "paper", "paper+label", "conv", "conv+label", "mlp", "mlp+label"] = "signal"
    """``paper``: the model's architecture, image in, one number out."""
    lr: Positive = SCORER_LR
    """Of Adam."""
    shrink: Count = 1
    """``paper`` and ``conv`` see images at a half, a third, ... of their height and width."""
    init: Path | None = None
    """A ``scorer.safetensors`` of an earlier run to start from."""


class DDSSettings(Settings):
    reward: Literal["finite_difference", "jvp", "per_example", "activations"] = "finite_difference"
    psi_gradient: Literal["expectation", "algorithm1"] = "expectation"
    optimizer_aware: bool = True
    update_every: Count = 1
    replay: Annotated[int, Field(strict=True, ge=0)] = 0
    """Batches of rewards that the scorer hears again at every step."""
    alignment: Literal["full", "last_layer"] | None = None
    """By default ``full``; with a budget ``last_layer`` while it is fresh, or none."""
    overhead: Positive | None = None
    """How much longer than a plain step one may take; chooses update_every by the clock."""
    max_logit: Positive | None = MAX_LOGIT
    uniform_mix: Share = 0.0
    dev_mode: DevMode = "train"
    caution: NotNegative | None = None
    """By default 8; 2 for a scorer that is told alignment in the last layer, with finite-difference rewards."""
    dev_average: Annotated[Share, Field(lt=1)] = 0.0
    scorer_precision: Literal["float32", "bfloat16"] = "float32"


class BatchWeightSettings(Settings):
    reward: Reward = "finite_difference"
    dev_mode: DevMode = "train"


class MentorNetSettings(Settings):
    lr: Positive = 1e-3
    percentile: PositiveShare = 0.7
    burn_in: Share = 0.2


class SelectionSettings(Settings):
    file: Path
    """Scores of the training examples, by ``gradsieve score``: Parquet with the columns id and score."""
    use: Literal["filter", "weight"] = "filter"
    """``filter``: train on the best `keep`. ``weight``: on all, each loss times exp(score), 1 on the average."""
    keep: PositiveShare = 0.8


class ImageRecipe(Recipe):
    batch_size: Count = 128
    dev_batch_size: Count = 128
    dev_holdout: Share = 0.0
    """Of the dev examples: kept from the method and measured apart, to see whether it overfits the others."""
    augment: Literal["none", "pad-crop-flip"] = "none"
    """On the device. Images read from files get their random resized crop and flip as they are read."""
    data: DataSettings
    damage: DamageSettings = DamageSettings()
    selection: SelectionSettings | None = None
    """Of the training set, by scores of an earlier run; None for all of it as it is."""
    model: ModelSettings
    optimizer: OptimizerSettings = OptimizerSettings()
    scorer: ScorerSettings = ScorerSettings()
    dds: DDSSettings = DDSSettings()
    spcl: SPCLSettings = SPCLSettings()
    batchweight: BatchWeightSettings = BatchWeightSettings()
    mentornet: MentorNetSettings = MentorNetSettings()
