"""How the agreement of examples with the dev gradient is measured: a signal before the step, a reward after it."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from .activations import Activations, Heard
from .errors import GradsieveError, check
from .forward import TrainingForward
from .last_layer import LastLayer, Outline, Seen, last_linear
from .parallel import World
from .reward import EPSILON, Theta, check_estimator, step_along
from .scorer import CAUTION, LESS_COMMON_CAUTION

ALIGNMENTS = ("full", "last_layer")
FRESH = 4
"""Steps between two dev gradients up to which a budget has psi told alignment. At 4 it helps; at 16 it misleads: what
agrees with a direction so old has mostly been learned since, and psi hears of no other. RESULTS.md has both."""


class Agreement:
    """v . grad l_i at theta_{t-1}, by one of several means; arguments as in `DDS`.

    `signals` is what the scorer asks to be told. `frugal` is for a budget where the user has not said how: alignment in
    the last layer, if there is one, and only while it is fresh to a scorer that can go by the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        signals: Sequence[str],
        *,
        reward: str = "finite_difference",
        cosine: bool = False,
        alignment: str | None = None,
        epsilon: float = EPSILON,
        frugal: bool = False,
    ):
        check(reward != "activations" or not cosine, "cosine needs each example's gradient; use reward='per_example'.")
        check_estimator("finite_difference" if reward == "activations" else reward, cosine)
        check(alignment in (None, *ALIGNMENTS), f"alignment must be one of {ALIGNMENTS}, not {alignment!r}.")
        check(epsilon > 0, f"epsilon must be above 0, not {epsilon}.")
        check(
            not world.sharded or reward == "finite_difference",
            f"reward={reward!r} needs whole parameters; a model under fully_shard takes 'finite_difference'.",
        )
        self.world, self.signals, self.reward, self.cosine, self.epsilon = world, signals, reward, cosine, epsilon
        self.direction: dict[str, Tensor] = {}
        """v, of the latest dev gradient."""
        self.activations = Activations(model) if reward == "activations" else None
        self._frugal = frugal and alignment is None
        wanted = alignment == "last_layer" or (self._frugal and last_linear(model) is not None)
        self.last_layer = LastLayer(model, world) if wanted and "alignment" in signals else None

    @property
    def less_common(self) -> bool:
        """Whether psi learns without what a batch has in common."""
        return self.last_layer is not None and self.reward == "finite_difference"

    @property
    def caution(self) -> float:
        """How much of it the scorer needs by default."""
        return LESS_COMMON_CAUTION if self.less_common else CAUTION

    def tells(self, every: int) -> bool:
        """Whether the scorer is told alignment where dev gradients are `every` steps apart; otherwise zeros."""
        if "alignment" not in self.signals:
            return False
        can_spare = self._frugal and "loss" in self.signals
        return not can_spare or (self.last_layer is not None and every <= FRESH)

    def again(self, learning: bool, telling: bool) -> bool:
        """Whether a training forward is going to be repeated."""
        return learning or (telling and self.last_layer is None)

    @contextmanager
    def listening(self, learning: bool, telling: bool) -> Iterator[tuple[Heard | None, list[Tensor] | None]]:
        """To a training forward: what all layers hear, and the last layer's totals, if rewards are to need them."""
        heard = totals = None
        with ExitStack() as stack:
            if self.last_layer is not None:
                if learning and self.less_common:
                    totals = stack.enter_context(self.last_layer.added_up())
                if telling or totals is not None:
                    stack.enter_context(self.last_layer.heard())
            if self.activations is not None and learning:
                heard = stack.enter_context(self.activations.heard())
            yield heard, totals

    def told(
        self, losses: Tensor, forward: TrainingForward, totals: Sequence[Tensor] | None, telling: bool
    ) -> tuple[dict[str, Tensor], Outline | None]:
        """What the scorer asks to be told, at theta_{t-1}, and what `rewards` needs to leave out the common part.

        Where no usable dev gradient is known, alignment is zero.
        """
        signals = {"loss": forward.losses} if "loss" in self.signals else {}
        listened = self.last_layer is not None
        seen = self._seen(losses) if telling or totals is not None else None
        if "alignment" in self.signals:
            found = nothing = torch.zeros_like(forward.losses)
            if telling and self.last_layer is not None and seen is not None:
                found = self.last_layer.alignment(seen, self.direction)
            elif telling and self.direction and not listened:
                found = self._measured(forward)
            signals["alignment"] = torch.where(found.isfinite().all(), found, nothing)
        return signals, seen.outline(totals) if seen is not None and totals else None

    def rewards(
        self,
        forwards: Sequence[TrainingForward],
        theta: Theta,
        outlines: Sequence[Outline | None],
        heard: Sequence[Heard | None],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Of each part of a batch the rewards, and what psi learns from: the same, or less what all have in common."""
        if self.activations is not None:
            r = [its.rewards(self.direction) for its in heard if its is not None]
            return r, r
        before = [outline for outline in outlines if outline is not None]
        if self.last_layer is None or len(before) < len(forwards):
            r = [self._measured(forward, theta) for forward in forwards]
            return r, r
        r, changes = [], []
        for forward, outline in zip(forwards, before, strict=True):
            with self.last_layer.added_up() as totals:
                r.append(self._measured(forward, theta))
            changes.append(outline.change(totals, passes=1 if forward.autocast is None else 2))
        eps, rows = step_along(self.direction, self.epsilon, self.world), sum(outline.rows for outline in before)
        common = self.last_layer.common(changes, rows, eps)
        return r, [outline.less(its, common) for its, outline in zip(r, before, strict=True)]

    def _measured(self, forward: TrainingForward, theta: Theta | None = None) -> Tensor:
        """By a pass at `theta`, by default the present parameters."""
        estimator = "finite_difference" if self.reward == "activations" else self.reward
        return forward.rewards(
            self.direction, estimator=estimator, cosine=self.cosine, theta=theta, epsilon=self.epsilon
        )

    def _seen(self, losses: Tensor) -> Seen | None:
        """A layer that was chosen without being asked for is given up if it does not see one row for each example."""
        if self.last_layer is None:
            return None
        try:
            return self.last_layer.seen(losses)
        except GradsieveError as error:
            if not self._frugal:
                raise
            warnings.warn(f"the budget does without the last layer: {error}", stacklevel=4)
            self.last_layer = None
            return None
