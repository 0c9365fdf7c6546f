"""Algorithm 1: every loss of the minibatch is scaled by the softmax of its score, and the scores are learned.

loss()   theta_{t-1}: losses, scores, weights          lines 3 to 5
the user's backward and optimizer.step()               line 6
step()   theta_t: dev gradient, rewards, psi           lines 7 to 10
"""

import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from .dev import DEV_MODES, DevBatches, dev_gradient
from .errors import GradsieveError, check
from .forward import TrainingForward, training_forward
from .networks import SignalScorer
from .optimizers import after_each_step, is_known, load_optimizer, no_derivative, optimizer_derivative
from .parameters import LossFn, device_of, norm, snapshot, trainable, untouched
from .randomness import RandomStream
from .record import StepRecord
from .reward import EPSILON, check_estimator
from .sampling import ScoreSampler
from .scorer import (
    CAUTION,
    MAX_LOGIT,
    OUTLOOK_START,
    PSI_GRADIENTS,
    bounded,
    checked_scores,
    climb,
    default_optimizer,
    effective_sample_size,
    example_weights,
    learned,
    outlook,
    price_of_uneven_weights,
    psi_objective,
)

SIGNALS = ("loss", "alignment")
DID_NOT_STEP = (
    "optimizer.step() has not run since dds.loss(), so the scorer was not updated. That is right when a "
    "GradScaler skips a step; otherwise call dds.step() after optimizer.step()."
)


@dataclass
class _Weighed:
    """What `loss()` leaves for `step()`."""

    forward: TrainingForward
    theta_prev: dict[str, Tensor]
    """Empty if the scorer's turn does not come."""
    scored: Tensor
    """Whether all scores were finite."""
    logits: Tensor  # (B,), zeros if not
    weights: Tensor  # (B,)
    derivative: dict[str, float | Tensor] | None = None
    """g', set when the optimizer steps."""


class DDS:
    """Differentiable Data Selection in a training loop of your own.

    ::

        dds = DDS(model, scorer, loss_fn, optimizer, dev_loader)
        for batch in train_loader:
            optimizer.zero_grad()
            loss = dds.loss(batch)          # instead of loss_fn(model, batch).mean()
            loss.backward()
            optimizer.step()
            dds.step()

    One `loss()` and one `step()` for each ``optimizer.step()``.

    Args:
        model: what is trained, theta.
        scorer: ``scorer(batch) -> (B,)``, psi; None for `SignalScorer`. One that declares
            ``signals = ("loss", "alignment")`` is called ``scorer(batch, loss=..., alignment=...)``.
        loss_fn: ``loss_fn(model, batch) -> (B,)``, one loss per example.
        optimizer: the model's.
        dev_loader: any re-iterable of batches; drawn from without end and moved to the model's device.
        scorer_optimizer: psi's; the default is Adam at 0.003. One that is not ``fused`` costs a wait for the
            device in each update, because a non-finite update must be held back.
        reward: ``"finite_difference"`` (Eq. 7), ``"jvp"`` or ``"per_example"``; see reward.py.
        cosine: reward by cosine instead of dot product; only with ``"per_example"``.
        psi_gradient: ``"expectation"`` (Eq. 6) or ``"algorithm1"`` (as printed); see scorer.py.
        optimizer_aware: pass the dev gradient through the optimizer's derivative (appendix A.1).
        update_every: update the scorer at every k-th step. Weights are computed at every step.
        max_logit: scores are bounded to +-max_logit by tanh; None for no bound.
        uniform_mix: share of each weight that is simply 1/B.
        caution: the price of uneven weights, in units of what a plain step does for dev: it falls as that does. At 0
            there is none, as in the paper; see `price_of_uneven_weights` in scorer.py.
        dev_mode: ``"train"`` runs the dev batch with every module in the mode that it trains in, BatchNorm thus on the
            dev batch's own statistics. ``"eval"``, as the authors do, with running statistics and without dropout.
            Neither changes the statistics.
        sampler: the `ScoreSampler` of the same scorer that draws the batches, if one does. Weights then only make up
            for what the scorer has learned since the draw.
        epsilon: length of the finite-difference step.
        seed: of the random numbers that DDS itself draws (dev shuffling, dropout in dev pass and scorer);
            by default torch's initial seed. The global random state is never touched.

    Memory beyond training: two copies of the parameters (theta_{t-1} and v), up to three more while a reward is
    measured, the scorer, and its activations between `loss()` and `step()`.
    """

    def __init__(
        self,
        model: nn.Module,
        scorer: nn.Module | None,
        loss_fn: LossFn,
        optimizer: Optimizer,
        dev_loader: Iterable[Any],
        *,
        scorer_optimizer: Optimizer | None = None,
        reward: str = "finite_difference",
        cosine: bool = False,
        psi_gradient: str = "expectation",
        optimizer_aware: bool = True,
        update_every: int = 1,
        max_logit: float | None = MAX_LOGIT,
        uniform_mix: float = 0.0,
        caution: float = CAUTION,
        dev_mode: str = "train",
        sampler: ScoreSampler | None = None,
        epsilon: float = EPSILON,
        seed: int | None = None,
    ):
        check_estimator(reward, cosine)
        check(psi_gradient in PSI_GRADIENTS, f"psi_gradient must be one of {PSI_GRADIENTS}, not {psi_gradient!r}.")
        check(dev_mode in DEV_MODES, f"dev_mode must be one of {DEV_MODES}, not {dev_mode!r}.")
        check(update_every >= 1, f"update_every must be at least 1, not {update_every}.")
        check(max_logit is None or max_logit > 0, f"max_logit must be above 0 or None, not {max_logit}.")
        check(0 <= uniform_mix <= 1, f"uniform_mix must lie between 0 and 1, not {uniform_mix}.")
        check(caution >= 0, f"caution must be 0 or more, not {caution}.")
        check(epsilon > 0, f"epsilon must be above 0, not {epsilon}.")
        check(bool(trainable(model)), "the model has no parameter that requires a gradient.")
        check(isinstance(optimizer, Optimizer), f"optimizer must be a torch one, not {type(optimizer).__name__}.")

        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        device = device_of(model)
        self.stream = RandomStream(device, torch.initial_seed() if seed is None else seed)
        if scorer is None:
            with self.stream:
                scorer = SignalScorer().to(device)
        self.scorer = scorer
        unknown = set(getattr(scorer, "signals", ())) - set(SIGNALS)
        check(not unknown, f"the scorer asks for signals {sorted(unknown)}; there are {SIGNALS}.")
        self.scorer_optimizer = scorer_optimizer or default_optimizer(scorer)
        check(
            {id(p) for p in learned(self.scorer_optimizer)}.isdisjoint(id(p) for p in model.parameters()),
            "the scorer and the model share parameters; the scorer's update would train the model. "
            "Give the scorer a copy (copy.deepcopy), or pass a scorer_optimizer of its own parameters only.",
        )
        check(
            sampler is None or (sampler.scorer is scorer and sampler.max_logit == max_logit),
            "sampler must be a ScoreSampler of the same scorer and with the same max_logit.",
        )
        self.dev = DevBatches(dev_loader, self.stream)
        self.reward, self.cosine, self.epsilon = reward, cosine, epsilon
        self.psi_gradient, self.sampler = psi_gradient, sampler
        self.optimizer_aware = optimizer_aware and is_known(optimizer)
        self.update_every, self.max_logit, self.uniform_mix = update_every, max_logit, uniform_mix
        self.caution, self.dev_mode = caution, dev_mode

        self.steps = 0
        self._skipped = torch.zeros((), dtype=torch.long, device=device)
        self._outlook = torch.full((), OUTLOOK_START, device=device)
        self._direction: dict[str, Tensor] = {}
        self._weighed: _Weighed | None = None
        self._warned = False
        after_each_step(optimizer, self, DDS._after_optimizer_step)

    def loss(self, batch: Any) -> Tensor:
        """sum_i p_i l_i(theta_{t-1}), lines 3 to 5 of Algorithm 1: a scalar to call ``backward()`` on."""
        updating = (self.steps + 1) % self.update_every == 0
        again = updating or "alignment" in getattr(self.scorer, "signals", ())
        losses, forward = training_forward(self.model, self.loss_fn, batch, who="DDS", again=again)
        theta_prev = snapshot(trainable(self.model)) if updating else {}
        with record_function("gradsieve.alignment"):
            signals = self._signals(forward)
        with record_function("gradsieve.scorer"), self.stream, torch.set_grad_enabled(updating):
            with untouched(self.scorer, training=False) if self.sampler else nullcontext():
                scores = checked_scores(self.scorer(batch, **signals), losses)
            scored = scores.isfinite().all()
            logits = bounded(torch.where(scored, scores, 0.0), self.max_logit)
            if self.sampler is not None:
                logits = logits - checked_scores(self.sampler.logits(batch), losses)
            weights = example_weights(logits, self.uniform_mix)
        self._weighed = _Weighed(forward, theta_prev, scored, logits, weights)
        return (weights.detach() * losses).sum()

    def step(self) -> StepRecord | None:
        """Lines 7 to 10 of Algorithm 1, after ``optimizer.step()``. A record if the scorer's turn came, else None."""
        weighed, self._weighed = self._weighed, None
        if weighed is None:
            raise GradsieveError("dds.step() needs the batch of dds.loss(): call loss() first, then step() once.")
        self.steps += 1
        if not weighed.theta_prev:
            return None
        forward, weights = weighed.forward, weighed.weights.detach()
        size = effective_sample_size(weights)
        if weighed.derivative is None:
            if not self._warned:
                warnings.warn(DID_NOT_STEP, stacklevel=2)
            self._warned, self._skipped = True, self._skipped + 1
            nothing = torch.full_like(weights, torch.nan)
            return StepRecord(self.steps, nothing, weights, size, nothing.mean(), {}, stepped=False)

        theta = trainable(self.model)
        dev_batch = self.dev.draw()
        with record_function("gradsieve.dev_gradient"), self.stream:
            dev_loss, d_theta = dev_gradient(
                self.model, self.loss_fn, dev_batch, theta, mode=self.dev_mode, autocast=forward.autocast
            )
        self._direction = {name: g * d_theta[name] for name, g in weighed.derivative.items() if name in d_theta}
        with record_function("gradsieve.reward"):
            r = self._rewards(forward, weighed.theta_prev)

        finite = {
            "loss": forward.losses.isfinite().all(),
            "score": weighed.scored,
            "dev gradient": norm(d_theta).isfinite() & dev_loss.isfinite(),
            "reward": r.isfinite().all(),
        }
        good = torch.stack(list(finite.values())).all()
        if self.scorer_optimizer is not None and weighed.logits.requires_grad:
            self._outlook = torch.where(good, outlook(self._outlook, r), self._outlook)
            price = price_of_uneven_weights(self.caution, self._outlook, r)
            objective = psi_objective(weighed.logits, weighed.weights, r, self.psi_gradient, price)
            with record_function("gradsieve.scorer"):
                finite["psi gradient"] = climb(self.scorer_optimizer, objective, good) | ~good
            good = good & finite["psi gradient"]
        self._skipped += ~good
        return StepRecord(self.steps, r, weights, size, dev_loss, finite)

    def _signals(self, forward: TrainingForward) -> dict[str, Tensor]:
        """What the scorer asks to be told, at theta_{t-1}. Where no usable dev gradient is known, alignment is zero."""
        wanted = getattr(self.scorer, "signals", ())
        signals = {"loss": forward.losses} if "loss" in wanted else {}
        if "alignment" in wanted:
            nothing = torch.zeros_like(forward.losses)
            found = self._rewards(forward) if self._direction else nothing
            signals["alignment"] = torch.where(found.isfinite().all(), found, nothing)
        return signals

    def _rewards(self, forward: TrainingForward, theta: dict[str, Tensor] | None = None) -> Tensor:
        """v . grad l_i at theta, by default the present parameters, (B,)."""
        return forward.rewards(
            self._direction, estimator=self.reward, cosine=self.cosine, theta=theta, epsilon=self.epsilon
        )

    def _after_optimizer_step(self) -> None:
        """Takes g' while gradients and learning rates are still those of the step."""
        if self._weighed is not None and self._weighed.theta_prev:
            theta = trainable(self.model)
            self._weighed.derivative = (
                optimizer_derivative(self.optimizer, theta, self._weighed.theta_prev)
                if self.optimizer_aware
                else no_derivative(self.optimizer, theta)
            )

    @property
    def skipped(self) -> int:
        """How many scorer updates were held back so far. Reading it waits for the device."""
        return int(self._skipped)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides model and optimizer. To be taken after `step()`."""
        return {
            "steps": self.steps,
            "skipped": self._skipped.clone(),
            "outlook": self._outlook.clone(),
            "scorer": self.scorer.state_dict(),
            "scorer_optimizer": self.scorer_optimizer.state_dict() if self.scorer_optimizer else None,
            "direction": dict(self._direction),
            "random": dict(self.stream.state),
            "dev": self.dev.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scorer.load_state_dict(state["scorer"])
        if self.scorer_optimizer:
            load_optimizer(self.scorer_optimizer, state["scorer_optimizer"])
        self._direction = {n: v.to(self.stream.device).clone() for n, v in state["direction"].items()}
        self.stream.state = {device: value.cpu() for device, value in state["random"].items()}
        self.dev.load_state_dict(state["dev"])
        self.steps = state["steps"]
        self._skipped = state["skipped"].to(self.stream.device).clone()
        self._outlook = state["outlook"].to(self.stream.device).clone()
        self._weighed = None
