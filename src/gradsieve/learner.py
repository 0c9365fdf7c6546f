"""psi: a scorer, how it scores a minibatch, and how it learns from rewards, fresh or heard before."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from .errors import check
from .joint import Joint
from .networks import SignalScorer
from .optimizers import load_optimizer
from .parallel import ALONE, Sizes, World
from .parameters import full_precision, untouched
from .randomness import RandomStream, seeded
from .replay import Lesson, Ring, foresight, hindsight
from .sampling import ScoreSampler
from .scorer import (
    OUTLOOK_START,
    PSI_GRADIENTS,
    bounded,
    checked_scores,
    climb,
    default_optimizer,
    example_weights,
    learned,
    outlook,
    price_of_uneven_weights,
    psi_objective,
)

SIGNALS = ("loss", "alignment")
PRECISIONS = ("float32", "bfloat16")


def reads_batch(scorer: nn.Module | None) -> bool:
    """Whether it is more than signals that a scorer is told; None stands for `SignalScorer`."""
    return scorer is not None and getattr(scorer, "reads_batch", True)


class Scored(NamedTuple):
    """A part of a batch as psi sees it."""

    batch: Any
    signals: dict[str, Tensor]
    """What psi was told."""
    finite: Tensor
    """Whether all scores were."""
    logits: Tensor  # (b,), zeros if not


class Learner:
    """Holds psi and all that its learning needs; arguments as in `DDS`."""

    def __init__(
        self,
        scorer: nn.Module | None,
        optimizer: Optimizer | None,
        stream: RandomStream,
        world: World,
        *,
        psi_gradient: str,
        max_logit: float | None,
        uniform_mix: float,
        caution: float,
        replay: int,
        precision: str,
        sampler: ScoreSampler | None,
    ):
        check(psi_gradient in PSI_GRADIENTS, f"psi_gradient must be one of {PSI_GRADIENTS}, not {psi_gradient!r}.")
        check(max_logit is None or max_logit > 0, f"max_logit must be above 0 or None, not {max_logit}.")
        check(0 <= uniform_mix <= 1, f"uniform_mix must lie between 0 and 1, not {uniform_mix}.")
        check(caution >= 0, f"caution must be 0 or more, not {caution}.")
        check(replay >= 0, f"replay must be 0 or more, not {replay}.")
        check(precision in PRECISIONS, f"scorer_precision must be one of {PRECISIONS}, not {precision!r}.")
        check(sampler is None or not replay, "lessons cannot be replayed for batches that a sampler has drawn.")
        if scorer is None:
            with stream:
                scorer = SignalScorer().to(stream.device)
        unknown = set(getattr(scorer, "signals", ())) - set(SIGNALS)
        check(not unknown, f"the scorer asks for signals {sorted(unknown)}; there are {SIGNALS}.")
        check(
            sampler is None or (sampler.scorer is scorer and sampler.max_logit == max_logit),
            "sampler must be a ScoreSampler of the same scorer and with the same max_logit.",
        )
        world.alike(scorer)
        self.scorer, self.stream, self.world, self.sampler = scorer, stream, world, sampler
        self.optimizer = optimizer or default_optimizer(scorer)
        self.psi_gradient, self.caution = psi_gradient, caution
        self.max_logit, self.uniform_mix, self.precision = max_logit, uniform_mix, precision
        self.ring = Ring(replay, seeded(stream.seed, "replay"), stream.device) if replay else None
        self.outlook = torch.full((), OUTLOOK_START, device=stream.device)

    @property
    def signals(self) -> tuple[str, ...]:
        """What the scorer asks to be told."""
        return tuple(getattr(self.scorer, "signals", ()))

    @property
    def reads_batch(self) -> bool:
        return reads_batch(self.scorer)

    @property
    def psi(self) -> list[Tensor]:
        return learned(self.optimizer)

    @property
    def knows_all(self) -> bool:
        """Whether each process is told the signals of all, so that it can repeat what psi has learned by itself."""
        return self.world.size > 1 and not self.reads_batch and bool(self.signals)

    def score(
        self,
        batch: Any,
        signals: dict[str, Tensor],
        losses: Tensor,
        sizes: Sizes,
        *,
        learning: bool,
        world: World | None = None,
    ) -> Scored:
        """Line 3: scores, with psi's graph if it is to learn from them."""
        world = world or self.world
        with record_function("gradsieve.scorer"), self.stream, torch.set_grad_enabled(learning):
            if torch.is_autocast_enabled(self.stream.device.type):  # the user's; psi keeps its own precision
                batch = full_precision(batch)
            with untouched(self.scorer, training=False) if self.sampler else nullcontext(), self._low():
                scores, signals = self._scores(batch, signals, losses, sizes, world)
            finite = scores.isfinite().all()
            logits = bounded(torch.where(finite, scores, 0.0), self.max_logit)
            if self.sampler is not None:
                logits = logits - checked_scores(self.sampler.logits(batch), losses)
            return Scored(batch, signals, finite, logits)

    def _scores(
        self, batch: Any, signals: dict[str, Tensor], losses: Tensor, sizes: Sizes, world: World
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A scorer that only reads signals is told those of all processes, whose mean and deviation it may take."""
        if world.size == 1 or not self.knows_all:
            return checked_scores(self.scorer(batch, **signals), losses), signals
        rows = world.gathered(torch.stack(list(signals.values()), 1), sizes)  # (N, signals)
        told = dict(zip(signals, rows.unbind(1), strict=True))
        return checked_scores(self.scorer(batch, **told), losses.new_empty(sizes.total))[sizes.place], told

    def _low(self) -> AbstractContextManager[Any]:
        low = self.precision == "bfloat16"
        return torch.autocast(self.stream.device.type, torch.bfloat16, enabled=low, cache_enabled=False)

    def joint(self, world: World | None = None) -> Joint:
        """The softmax of line 4, over a batch whose parts are yet to come."""
        return Joint(world or self.world, self.uniform_mix, self.trust)

    @property
    def trust(self) -> Tensor | float:
        """How far psi's scores count: 1, or of a psi that learns from replayed lessons what replay.py makes of them."""
        return self.ring.trust if self.ring is not None and self.psi else 1.0

    def learn(self, parts: Sequence[Scored], joint: Joint, r: Sequence[Tensor], good: Tensor, steps: int) -> Tensor:
        """Line 10: psi's step by fresh rewards of all parts, `steps` after the ones before. Whether all went well."""
        if self.optimizer is None or not parts[0].logits.requires_grad:
            return good
        everyone = joint.gathered(r)  # (N,)
        self.outlook = torch.where(good, outlook(self.outlook, everyone, steps), self.outlook)
        if self.ring is not None:  # lessons are told in units of their deviation
            unit = torch.maximum(everyone.std(correction=0), 1e-6 * everyone.mean().abs()).clamp_min(1e-30)
            everyone, r = everyone / unit, [its / unit for its in r]
        with record_function("gradsieve.scorer"):
            finite, weights, price = self._climb(joint, everyone, good)
        good = good & finite
        if self.ring is not None:
            proved = hindsight(weights, everyone, price)
            self.ring.judge(torch.where(good & proved.isfinite().all(), proved, 0.0), steps)
            followed = everyone.split(joint.totals) if self.knows_all else r
            lessons = [
                Lesson(part.batch if self.reads_batch else None, part.signals, torch.where(good, its, 0.0))
                for part, its in zip(parts, followed, strict=True)
            ]
            self.ring.add(lessons, foresight(weights, torch.where(good, everyone, 0.0)))
        return good

    def hear_again(self) -> None:
        """psi's step by one of the lessons that it has heard before, if they are kept."""
        if self.ring is None or self.optimizer is None or (lesson := self.ring.draw()) is None:
            return
        world = ALONE if self.knows_all else self.world  # the same lesson everywhere: nothing is to be sent
        with record_function("gradsieve.replay"):
            sizes = world.sizes(len(lesson.rewards))
            part = self.score(lesson.batch, dict(lesson.signals), lesson.rewards, sizes, learning=True, world=world)
            if not part.logits.requires_grad:  # psi has been frozen since
                return
            joint = self.joint(world)
            joint.join(part.logits, sizes)
            self._climb(joint, joint.gathered([lesson.rewards]), world.agreed(part.finite))

    def _climb(self, joint: Joint, r: Tensor, good: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """psi's step by the rewards of a whole batch, (N,).

        Whether its gradient was finite, its own weights, (N,), and their price.
        """
        assert self.optimizer is not None
        logits = joint.logits()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        weights = example_weights(logits, self.uniform_mix)
        price = price_of_uneven_weights(self.caution, self.outlook, r)
        objective = psi_objective(logits, weights, r, self.psi_gradient, price)
        return climb(self.optimizer, objective, good, joint.world), weights.detach(), price

    def state_dict(self) -> dict[str, Any]:
        return {
            "scorer": self.scorer.state_dict(),
            "scorer_optimizer": self.optimizer.state_dict() if self.optimizer else None,
            "outlook": self.outlook.clone(),
            "ring": self.ring.state_dict() if self.ring else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scorer.load_state_dict(state["scorer"])
        if self.optimizer:
            load_optimizer(self.optimizer, state["scorer_optimizer"])
        self.outlook = state["outlook"].to(self.stream.device).clone()
        if self.ring is not None and state["ring"] is not None:
            self.ring.load_state_dict(state["ring"], self.stream.device)
