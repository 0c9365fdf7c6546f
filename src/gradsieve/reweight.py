"""Algorithm 1: every loss of the minibatch is scaled by the softmax of its score, and the scores are learned.

loss()   theta_{t-1}: losses, scores, weights          lines 3 to 5
the user's backward and optimizer.step()               line 6
step()   theta_t: dev gradient, rewards, psi           lines 7 to 10
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from .agreement import Agreement
from .budget import Budget
from .dev import DEV_MODES, DevBatches, dev_gradient
from .errors import GradsieveError, check
from .forward import training_forward
from .last_layer import LastLayer
from .learner import Learner, reads_batch
from .optimizers import after_each_step, is_known, no_derivative, optimizer_derivative
from .parallel import World, shard_of, sharded_like, unwrapped
from .parameters import LossFn, device_of, norm, snapshot, trainable
from .randomness import RandomStream
from .record import StepRecord
from .reward import EPSILON
from .sampling import ScoreSampler
from .scorer import CAUTION, MAX_LOGIT
from .turn import Turn

REPLAY = 128
"""Batches of rewards that a budget keeps for a scorer of signals. To one that reads the batches it repeats nothing:
that costs as much as the scorer's own step and brought nothing; see RESULTS.md."""
DID_NOT_STEP = (
    "optimizer.step() has not run since dds.loss(), so the scorer was not updated. That is right when a "
    "GradScaler skips a step; otherwise call dds.step() after optimizer.step()."
)


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

    One `step()` for each ``optimizer.step()``. Several `loss()`, each with its backward, accumulate gradients: weights
    are those of the softmax over all micro-batches together; they sum to 1, so do not divide losses by their number.

    Under DistributedDataParallel or FSDP2 (``fully_shard``) the softmax is over the batches of all processes, and so
    are dev gradient, rewards and psi's updates. Pass the wrapped model, and in each process its part of the dev set.

    Args:
        model: what is trained, theta.
        scorer: ``scorer(batch) -> (B,)``, psi; None for `SignalScorer`. One that declares
            ``signals = ("loss", "alignment")`` is called ``scorer(batch, loss=..., alignment=...)``.
        loss_fn: ``loss_fn(model, batch) -> (B,)``, one loss per example.
        optimizer: the model's.
        dev_loader: any re-iterable of batches; drawn from without end and moved to the model's device.
        scorer_optimizer: psi's; the default is Adam at 0.003. One that is not ``fused`` costs a wait for the
            device in each update, because a non-finite update must be held back.
        reward: ``"finite_difference"`` (Eq. 7), ``"jvp"`` or ``"per_example"``; see reward.py. Or ``"activations"``,
            from what the training backward has computed, all of which it keeps until `step()`; see activations.py.
        cosine: reward by cosine instead of dot product; only with ``"per_example"``.
        psi_gradient: ``"expectation"`` (Eq. 6) or ``"algorithm1"`` (as printed); see scorer.py.
        optimizer_aware: pass the dev gradient through the optimizer's derivative (appendix A.1).
        update_every: measure rewards at every k-th step. Weights are computed at every step.
        replay: how many batches of rewards are kept, so that the scorer learns at every step; see replay.py. Where the
            scorer reads the batch, as many batches are kept too. Rewards then count in units of their deviation, and
            scores as far as they have proved worth it: ``record.trust``.
        alignment: how the signal of that name is measured: ``"full"``, a forward pass, or ``"last_layer"``, next to
            nothing; see last_layer.py. Rewards are those of all layers in any case; a scorer that is told alignment in
            the last layer learns from them less what the batch has in common, if they are finite differences. None is
            ``"full"``; with a budget it is ``"last_layer"`` while `update_every` is at most 4. If it is more, or the
            model has no such layer, a scorer that is told the loss too gets zeros: old agreement misleads it.
        overhead: a budget, such as 0.10: how much longer than plain training a step may take. It chooses `update_every`
            by the time that steps take, and for a scorer of signals a replay of 128. Since the clock decides, two runs
            are no longer the same; ``record.update_every`` tells what was chosen and ``record.overhead`` what DDS adds
            to a plain step. If the budget is not kept, the log says so once.
        max_logit: scores are bounded to +-max_logit by tanh; None for no bound.
        uniform_mix: share of each weight that is simply 1/B.
        caution: the price of uneven weights, in units of what a plain step does for dev: it falls as that does. At 0
            there is none, as in the paper; see `price_of_uneven_weights` in scorer.py. None is 8, or 2 where the scorer
            learns without what the batch has in common.
        dev_average: share of the dev gradient that is kept from the steps before: 0.9 averages about ten dev batches.
        scorer_precision: ``"float32"``, or ``"bfloat16"`` for the scorer's passes under autocast.
        dev_mode: ``"train"`` runs the dev batch with every module in the mode that it trains in, BatchNorm thus on the
            dev batch's own statistics. ``"eval"``, as the authors do, with running statistics and without dropout.
            Neither changes the statistics.
        sampler: the `ScoreSampler` of the same scorer that draws the batches, if one does. Weights then only make up
            for what the scorer has learned since the draw.
        epsilon: length of the finite-difference step.
        seed: of the random numbers that DDS itself draws (dev shuffling, dropout in dev pass and scorer);
            by default torch's initial seed. The global random state is never touched.

    Memory beyond training: a copy of the parameters between steps (v), a second one between `loss()` and `step()`
    (theta_{t-1}), five while a reward is measured; the scorer, and its activations between `loss()` and `step()`.
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
        replay: int = 0,
        alignment: str | None = None,
        overhead: float | None = None,
        max_logit: float | None = MAX_LOGIT,
        uniform_mix: float = 0.0,
        caution: float | None = None,
        dev_average: float = 0.0,
        scorer_precision: str = "float32",
        dev_mode: str = "train",
        sampler: ScoreSampler | None = None,
        epsilon: float = EPSILON,
        seed: int | None = None,
    ):
        check(0 <= dev_average < 1, f"dev_average must lie in 0 to 1, below 1, not {dev_average}.")
        check(dev_mode in DEV_MODES, f"dev_mode must be one of {DEV_MODES}, not {dev_mode!r}.")
        check(update_every >= 1, f"update_every must be at least 1, not {update_every}.")
        check(overhead is None or overhead > 0, f"overhead must be above 0, such as 0.1, not {overhead}.")
        check(overhead is None or update_every == 1, "overhead chooses update_every: give one of them.")
        check(bool(trainable(model)), "the model has no parameter that requires a gradient.")
        check(isinstance(optimizer, Optimizer), f"optimizer must be a torch one, not {type(optimizer).__name__}.")

        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.world, device = World(model), device_of(model)
        seed = self.world.told(torch.initial_seed() % 2**63 if seed is None else seed)
        self.stream = RandomStream(device, seed)
        self.budget = None if overhead is None else Budget(overhead, device, self.world)
        if self.budget is not None and not replay and sampler is None and not reads_batch(scorer):
            replay = REPLAY
        self.learner = Learner(
            scorer,
            scorer_optimizer,
            self.stream,
            self.world,
            psi_gradient=psi_gradient,
            max_logit=max_logit,
            uniform_mix=uniform_mix,
            caution=CAUTION if caution is None else caution,
            replay=replay,
            precision=scorer_precision,
            sampler=sampler,
        )
        check(
            {id(p) for p in self.learner.psi}.isdisjoint(id(p) for p in model.parameters()),
            "the scorer and the model share parameters; the scorer's update would train the model. "
            "Give the scorer a copy (copy.deepcopy), or pass a scorer_optimizer of its own parameters only.",
        )
        if self.world.rank:  # psi begins alike everywhere, dev batches and their dropout do not
            self.stream.state = RandomStream(device, seed + self.world.rank).state
        self._caution = caution
        self.agreement = Agreement(
            self._own,
            self.world,
            self.learner.signals,
            reward=reward,
            cosine=cosine,
            alignment=alignment,
            epsilon=epsilon,
            frugal=self.budget is not None,
        )
        self.dev = DevBatches(dev_loader, self.stream)
        self.dev_mode = dev_mode
        self.dev_average, self._d_theta = dev_average, dict[str, Tensor]()
        self.optimizer_aware = optimizer_aware and is_known(optimizer)

        self._every = update_every
        self.steps = self._since = 0
        self._skipped = torch.zeros((), dtype=torch.long, device=device)
        self._turn: Turn | None = None
        self._warned = False
        after_each_step(optimizer, self, DDS._after_optimizer_step)

    def loss(self, batch: Any) -> Tensor:
        """sum_i p_i l_i(theta_{t-1}), lines 3 to 5 of Algorithm 1: a scalar to call ``backward()`` on.

        Called again before ``optimizer.step()``, it scales down the gradients of the micro-batches before this one.
        Of several processes each returns its part of the sum times their number, as their mean makes the gradient.
        """
        self._mark()
        turn = self._turn if self._turn is not None and self._turn.goes_on(self._own) else None
        learning = self._since + 1 >= self.update_every if turn is None else turn.learning
        telling = self.tells_alignment
        self._mark()
        with self.agreement.listening(learning, telling) as (heard, totals):
            again = self.agreement.again(learning, telling)
            losses, forward = training_forward(
                self.model, self.loss_fn, batch, who="DDS", again=again, world=self.world
            )
        self._mark()
        if turn is None:
            theta = trainable(self._own)
            self._turn = turn = Turn(self.learner.joint(), theta, snapshot(theta) if learning else {})
        with record_function("gradsieve.alignment"):
            signals, outline = self.agreement.told(losses, forward, totals, telling)
        if self._caution is None:
            self.learner.caution = self.agreement.caution
        scored = self.learner.score(batch, signals, forward.losses, forward.sizes, learning=learning)
        weights = turn.add(self._own, forward, scored, outline, heard) * self.world.size
        if heard is not None:
            heard.listen(losses)
        loss = (weights * losses).sum()
        turn.listen(loss)
        self._mark()
        return loss

    @property
    def weighted_loss(self) -> Tensor:
        """sum_i p_i l_i over all micro-batches since the last `step()`, by their weights together: for a log.

        Free of any graph. The numbers that `loss()` has returned do not add up to it, as weights fall with each part.
        """
        if self._turn is None:
            return torch.zeros((), device=self.stream.device)
        parts = zip(self._turn.joint.own_weights(), self._turn.forwards, strict=True)
        return torch.stack([(weights * forward.losses).sum() for weights, forward in parts]).sum() * self.world.size

    def step(self) -> StepRecord | None:
        """Lines 7 to 10 of Algorithm 1, after ``optimizer.step()``. A record if rewards were measured, else None."""
        turn, self._turn = self._turn, None
        if turn is None:
            raise GradsieveError("dds.step() needs the batch of dds.loss(): call loss() first, then step() once.")
        self._mark()
        self.steps += 1
        self._since += 1
        record = self._learn(turn) if turn.learning else None
        self.learner.hear_again()
        self._mark()
        if self.budget is not None:
            self.budget.ended(record is not None)
        return record

    def _learn(self, turn: Turn) -> StepRecord:
        """The dev gradient at theta_t, the rewards of the batch, and psi's step by them."""
        since, self._since = self._since, 0
        weights, trust = turn.weights(), turn.joint.trust
        every, spent = self.update_every, None if self.budget is None else self.budget.spent
        size = 1 / self.world.summed(weights.square().sum())
        if turn.derivative is None:
            if not self._warned:
                warnings.warn(DID_NOT_STEP, stacklevel=3)
            self._warned, self._skipped = True, self._skipped + 1
            nothing = torch.full_like(weights, torch.nan)
            return StepRecord(self.steps, nothing, weights, size, nothing.mean(), {}, False, every, trust, spent)

        dev_batch = self.dev.draw()
        with record_function("gradsieve.dev_gradient"), self.stream:
            dev_loss, d_theta = dev_gradient(
                self._own,
                self.loss_fn,
                dev_batch,
                {name: p for name, p in turn.theta.items() if p.requires_grad},  # some may have been frozen since
                mode=self.dev_mode,
                modes=turn.forwards[-1].modes if self.dev_mode == "train" else (),
                autocast=turn.forwards[-1].autocast,
                world=self.world,
            )
        d_theta = self._averaged(d_theta)
        self.agreement.direction = {n: g * d_theta[n] for n, g in turn.derivative.items() if n in d_theta}
        with record_function("gradsieve.reward"):
            parts, lessons = self.agreement.rewards(turn.forwards, turn.theta_prev, turn.outlines, turn.heard)
        r = torch.cat(parts)

        finite = turn.finite() | {
            "dev gradient": norm(d_theta).isfinite() & dev_loss.isfinite(),
            "reward": torch.cat(lessons).isfinite().all(),
        }
        good = self.world.agreed(torch.stack(list(finite.values())).all())
        learned = self.learner.learn(turn.scored, turn.joint, lessons, good, since)
        finite["psi gradient"] = learned | ~good
        self._skipped += ~learned
        return StepRecord(self.steps, r, weights, size, dev_loss, finite, True, every, trust, spent)

    def _averaged(self, d_theta: dict[str, Tensor]) -> dict[str, Tensor]:
        """The dev gradient and those before it, if they count."""
        if not self.dev_average:
            return d_theta
        rate, before = 1 - self.dev_average, self._d_theta
        good = norm(d_theta, self.world).isfinite()
        self._d_theta = {
            n: torch.where(good, before[n].lerp(g, rate) if n in before else g, before.get(n, 0.0))
            for n, g in d_theta.items()
        }
        return self._d_theta

    def _after_optimizer_step(self) -> None:
        """Takes g' while gradients and learning rates are still those of the step."""
        if self._turn is None:
            return
        self._turn.stepped = True
        if self._turn.learning:
            theta, before = self._turn.theta, self._turn.theta_prev
            self._turn.derivative = (
                optimizer_derivative(self.optimizer, theta, before)
                if self.optimizer_aware
                else no_derivative(self.optimizer, theta)
            )

    def _mark(self) -> None:
        if self.budget is not None:
            self.budget.mark()

    @property
    def _own(self) -> nn.Module:
        return unwrapped(self.model)

    @property
    def scorer(self) -> nn.Module:
        return self.learner.scorer

    @property
    def scorer_optimizer(self) -> Optimizer | None:
        return self.learner.optimizer

    @property
    def last_layer(self) -> LastLayer | None:
        """Where alignment is measured, if there alone."""
        return self.agreement.last_layer

    @property
    def tells_alignment(self) -> bool:
        """Whether the scorer is told it now, and not zeros in its place."""
        return self.agreement.tells(self.update_every)

    @property
    def update_every(self) -> int:
        """Rewards are measured at every k-th step; with a budget, what it chooses now."""
        return self._every if self.budget is None else self.budget.every

    @property
    def skipped(self) -> int:
        """How many scorer updates were held back so far. Reading it waits for the device."""
        return int(self._skipped)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides model and optimizer. To be taken after `step()`."""
        theta = trainable(self._own)
        return {
            "steps": self.steps,
            "since": self._since,
            "skipped": self._skipped.clone(),
            **self.learner.state_dict(),
            "direction": {n: sharded_like(v, theta[n]) for n, v in self.agreement.direction.items() if n in theta},
            "dev_average": {n: sharded_like(v, theta[n]) for n, v in self._d_theta.items() if n in theta},
            "random": dict(self.stream.state),
            "dev": self.dev.state_dict(),
            "budget": self.budget.state_dict() if self.budget else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state)
        theta, device = trainable(self._own), self.stream.device
        self.agreement.direction, self._d_theta = (
            {n: shard_of(v, theta[n]).to(device).clone() for n, v in state[name].items() if n in theta}
            for name in ("direction", "dev_average")
        )
        self.stream.state = {device: value.cpu() for device, value in state["random"].items()}
        self.dev.load_state_dict(state["dev"])
        if self.budget is not None and state["budget"] is not None:
            self.budget.load_state_dict(state["budget"])
        self.steps, self._since = state["steps"], state["since"]
        self._skipped = state["skipped"].to(self.stream.device).clone()
        self._turn = None
