"""One loss per example from the logits of a Transformers model, where the model itself returns a mean."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss import loss_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import GradsieveError, check

IGNORED = -100
"""The label that Transformers gives to padding and to whatever else is not to be learned."""
NOT_KNOWN = (
    "DDSTrainer knows the losses of sequence and token classification and of causal and masked language models, not "
    "that of {}. Pass compute_loss_func, a function (outputs, labels, num_items_in_batch) that returns one loss per "
    "example, shape (B,)."
)


def example_losses(model: nn.Module, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The loss that a Transformers model of this class computes itself, one per example, (B,)."""
    own: Any = model
    if hasattr(own, "get_base_model"):  # inside of PEFT
        own = own.get_base_model()
    name, config = type(own).__name__, getattr(own, "config", None)
    kind = loss_utils.LOSS_MAPPING.get(getattr(own, "loss_type", None) or "")
    if getattr(config, "is_encoder_decoder", False):
        raise GradsieveError(NOT_KNOWN.format(name))
    if kind is loss_utils.ForCausalLMLoss or name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return causal_lm_losses(logits, labels, label_smoothing)
    if kind in (loss_utils.ForMaskedLMLoss, loss_utils.ForTokenClassification):
        return token_losses(logits, labels, label_smoothing)
    check(kind is loss_utils.ForSequenceClassificationLoss and config is not None, NOT_KNOWN.format(name))
    problem = problem_type(config, labels)
    if problem == "single_label_classification":
        return classification_losses(logits, labels, label_smoothing)
    check(not label_smoothing, f"label_smoothing_factor has no meaning for {problem.replace('_', ' ')}: leave it at 0.")
    return regression_losses(logits, labels) if problem == "regression" else multi_label_losses(logits, labels)


def problem_type(config: Any, labels: Tensor) -> str:
    """As Transformers tells the three kinds of sequence classification apart."""
    if config.problem_type is not None:
        return str(config.problem_type)
    if config.num_labels == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def classification_losses(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of logits (B, C) and classes (B,)."""
    return F.cross_entropy(logits.float(), labels.view(-1), reduction="none", label_smoothing=label_smoothing)


def multi_label_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of logits (B, C) and labels (B, C) in [0, 1], mean over the classes."""
    return F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none").mean(1)


def regression_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Squared error of (B, K) and (B, K), or (B, 1) and (B,), mean over the targets."""
    predicted = logits.float().flatten(1)
    return (predicted - labels.float().view_as(predicted)).square().mean(1)


def token_losses(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of logits (B, T, V) and labels (B, T): of each example the mean over its labels that count.

    An example in which none counts has loss 0.
    """
    each = F.cross_entropy(
        logits.float().flatten(0, 1),
        labels.flatten(),
        reduction="none",
        ignore_index=IGNORED,
        label_smoothing=label_smoothing,
    ).view_as(labels)  # (B, T), 0 where ignored
    return each.sum(1) / (labels != IGNORED).sum(1).clamp_min(1)


def causal_lm_losses(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """`token_losses` where position t predicts the label of t + 1, as causal language models in Transformers do."""
    return token_losses(logits[:, :-1], labels[:, 1:], label_smoothing)
