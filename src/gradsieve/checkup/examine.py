"""The check-up, check by check."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import GradsieveError
from ..parameters import LossFn, device_of
from .case import Case
from .copies import copied, duplicates, nothing_changes
from .diagnosis import BROKEN, Diagnosis, Finding
from .overlap import check_overlap, row_fingerprints
from .parts import check_losses, check_optimizer, check_scorer
from .passes import check_coupling, check_randomness
from .rewards import check_noise, check_precision, check_rewards
from .trial import Trial, check_cost, check_weights, tried


def doctor(
    model: nn.Module,
    scorer: nn.Module | None,
    loss_fn: LossFn,
    optimizer: Optimizer,
    train_batch: Any,
    dev_batch: Any,
    *,
    settings: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Looks whether DDS can work with these, before hours are spent. Takes some dozens of passes over the batches.

    ::

        diagnosis = gradsieve.doctor(model, scorer, loss_fn, optimizer, train_batch, dev_batch)
        print(diagnosis)        # what is fine, what is doubtful, what is broken, and what to do
        assert diagnosis.ok     # nothing is broken

    Everything is tried on deep copies: parameters, gradients, buffers, optimizer and random state stay as they are, bit
    for bit. Call it where training calls `DDS`: under autocast, if training runs so.

    Args:
        model, scorer, loss_fn, optimizer: as `DDS` takes them.
        train_batch: a batch as the training loop gets it, of the usual size.
        dev_batch: likewise of the dev loader.
        settings: further arguments that `DDS` will be given, such as ``{"reward": "jvp"}``; but no sampler.
    """
    settings = dict(settings or {})
    if settings.pop("sampler", None) is not None:
        raise GradsieveError("doctor() examines the weighting of batches; leave the sampler out of its settings.")
    device, grad_enabled = device_of(model), torch.is_grad_enabled()
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    with nothing_changes(model, scorer), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        copies = duplicates((model, scorer, optimizer, settings))
        overlap = _tried("overlap", lambda: _overlap(train_batch, dev_batch))
        try:
            model, scorer, optimizer, settings = copies
            case = Case(model, scorer, loss_fn, optimizer, copied(train_batch), copied(dev_batch), settings, autocast)
        except TypeError as error:
            raise GradsieveError(f"settings must be arguments of DDS: {error}.") from error
        except GradsieveError as error:
            return Diagnosis((Finding("set-up", BROKEN, str(error), "The rest can be looked at after that."), overlap))
        return _examined(case, overlap, grad_enabled)


def _overlap(train_batch: Any, dev_batch: Any) -> Finding:
    dev, train = row_fingerprints(dev_batch), row_fingerprints(train_batch)
    return check_overlap(dev, train, "examples of the dev batch", "the training batch")


def _examined(case: Case, overlap: Finding, grad_enabled: bool) -> Diagnosis:
    found = [
        _tried("losses", lambda: check_losses(case, grad_enabled)),
        _tried("optimizer", lambda: check_optimizer(case)),
    ]
    if any(finding.verdict == BROKEN for finding in found):
        return Diagnosis((*found, overlap))  # nothing else can be measured
    found += _measured(case)
    trial: list[Trial] = []

    def weights() -> Finding:
        trial.append(tried(case))
        return check_weights(trial[0])

    found += [_tried("weights", weights), overlap]
    if not trial:
        return Diagnosis(tuple(found))
    found.append(check_cost(case, trial[0]))
    return Diagnosis(tuple(found), trial[0].plain_seconds, trial[0].dds_seconds)


def _measured(case: Case) -> Iterator[Finding]:
    checks: dict[str, Callable[[Case], Finding]] = {
        "precision": check_precision,
        "rewards": check_rewards,
        "randomness": check_randomness,
        "BatchNorm": check_coupling,
        "dev batch": check_noise,
        "scorer": check_scorer,
    }
    for name, check in checks.items():
        yield _tried(name, lambda check=check: check(case))  # type: ignore[misc]


def _tried(name: str, check: Callable[[], Finding]) -> Finding:
    """The finding; or, if the user's code fails in any way, that it does."""
    try:
        return check()
    except GradsieveError as error:
        return Finding(name, BROKEN, str(error))
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        return Finding(
            name, BROKEN, f"fails with {type(error).__name__}: {reason}", "DDS would fail likewise: mend it."
        )
