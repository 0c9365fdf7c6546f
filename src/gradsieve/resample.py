"""Algorithm 2: groups of data (languages, domains, sources) are drawn as often as they help one of them.

draw()      line 3: the group of each item, from p(S_i | y; psi) over the groups that have the item
observe()   line 6: the decayed gradient of the group that was trained on
step()      lines 7 to 11: every K items, E updates of psi by how well the groups' gradients agree with the target's
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.profiler import record_function

from .errors import check
from .gradients import Gradients, GradientStore
from .networks import GroupScorer
from .optimizers import load_optimizer
from .parallel import World
from .record import GroupRecord
from .scorer import climb, learned

PSI_GRADIENTS = ("algorithm2", "expectation")


def group_log_probabilities(logits: Tensor, available: Tensor) -> Tensor:
    """log p(S_i | y_j; psi): the softmax over the groups that item j has, (N, n); minus infinity for the others."""
    return torch.log_softmax(logits.masked_fill(~available.bool(), -torch.inf), dim=1)


def group_objective(log_prob: Tensor, rewards: Tensor, form: str) -> Tensor:
    """What psi climbs; its gradient is d_psi. `rewards` (n,) are constants, groups that an item lacks do not count.

    - ``"algorithm2"``, as printed there: ``1/B sum_j sum_i r_i grad log p(S_i | y_j)``. Where all rewards are positive
      it comes to rest at p proportional to r; a group of negative reward is driven out.
    - ``"expectation"``, each term weighted by p: the derivative of the expected reward, which ends at the best group.
    """
    has = log_prob.isfinite()
    term = torch.where(has, log_prob, 0.0) if form == "algorithm2" else log_prob.exp()
    return (has * rewards * term).sum(1).mean()


class GroupDDS:
    """Differentiable Data Selection over groups of data, in a training loop of your own.

    ::

        dds = GroupDDS(None, num_groups=8, target_group=0)
        for items in batches:
            groups = dds.draw(items.available)             # (N,), one group for each item
            for group in groups.unique().tolist():
                ...                                        # loss on the items of that group, backward
                dds.observe(group, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
                ...                                        # optimizer.step()
            dds.step()

    Args:
        scorer: ``scorer(available) -> (N, n)`` logits, psi; None for `GroupScorer`.
        num_groups: n.
        target_group: S, the group that the model is to be good at.
        scorer_optimizer: psi's; by default Adam at 0.0001, as in the paper.
        items_between: K, how many items are drawn between two updates of the scorer.
        updates: E, how many steps psi then takes.
        batch_size: B, how many of the items drawn last each of them looks at.
        decay: alpha_1 and alpha_2.
        cosine: reward by cosine, as the paper does; else by dot product.
        reward_scale: what rewards are multiplied by.
        psi_gradient: ``"algorithm2"`` as printed, or ``"expectation"``; see `group_objective`.
        store_dtype: float32 or bfloat16, for the decayed gradients.
        projection: length of a random projection of the gradients instead of them; see `GradientStore`.
        generator: random numbers for draws and for psi's batches; by default its own, seeded by torch's initial seed.
        model: what is trained, if several processes train it (DistributedDataParallel, FSDP2). Each then draws K items,
            the gradients that they observe count together, and the first process's scorer is everybody's. With the same
            generator everywhere they draw the same groups, as they must if gradients are synchronised before `observe`.

    The scorer stays on the CPU, where items are drawn; gradients stay on their device, and only an update waits for it.
    """

    def __init__(
        self,
        scorer: nn.Module | None,
        num_groups: int,
        target_group: int,
        *,
        scorer_optimizer: Optimizer | None = None,
        items_between: int = 20_000,
        updates: int = 1,
        batch_size: int = 160,
        decay: tuple[float, float] = (0.5, 1.0),
        cosine: bool = True,
        reward_scale: float = 1.0,
        psi_gradient: str = "algorithm2",
        store_dtype: torch.dtype = torch.float32,
        projection: int | None = None,
        generator: torch.Generator | None = None,
        model: nn.Module | None = None,
    ):
        check(num_groups >= 1, f"num_groups must be at least 1, not {num_groups}.")
        check(0 <= target_group < num_groups, f"target_group must lie in 0 to {num_groups - 1}, not {target_group}.")
        check(items_between >= 1, f"items_between must be at least 1, not {items_between}.")
        check(updates >= 0, f"updates must be 0 or more, not {updates}.")
        check(batch_size >= 1, f"batch_size must be at least 1, not {batch_size}.")
        check(psi_gradient in PSI_GRADIENTS, f"psi_gradient must be one of {PSI_GRADIENTS}, not {psi_gradient!r}.")
        self.world = World(model)
        seed = self.world.told(torch.initial_seed() % 2**63)  # processes that draw alike train on the same group
        self.generator = generator or torch.Generator().manual_seed(seed)
        self.scorer = GroupScorer(num_groups, generator=self.generator) if scorer is None else scorer
        self.world.alike(self.scorer)
        psi = {"params": list(self.scorer.parameters())}  # a scorer may have none
        self.scorer_optimizer = scorer_optimizer or Adam([psi], lr=1e-4)
        self.num_groups, self.target_group = num_groups, target_group
        self.items_between, self.updates, self.batch_size = items_between, updates, batch_size
        self.cosine, self.reward_scale, self.psi_gradient = cosine, reward_scale, psi_gradient
        self.store = GradientStore(
            num_groups,
            decay=decay,
            dtype=store_dtype,
            projection=projection,
            seed=self.generator.initial_seed() % 2**63,
        )
        self.steps = self._since = self._skipped = 0
        self._recent = torch.zeros(0, num_groups, dtype=torch.bool)  # availability of the items drawn last
        self._drawn = torch.zeros(num_groups, dtype=torch.long)

    @torch.no_grad()
    def probabilities(self, available: Tensor) -> Tensor:
        """p(S_i | y_j; psi), (N, n), or (n,) for one item."""
        rows = self._rows(available)
        return group_log_probabilities(self.scorer(rows.float()), rows).exp().view(available.shape)

    @torch.no_grad()
    def draw(self, available: Tensor) -> Tensor:
        """A group for each item, (N,), among those that have it: `available` (N, n) is 0 or 1; (n,) for one item."""
        p = self.probabilities(self._rows(available))
        groups = torch.multinomial(p, 1, generator=self.generator).squeeze(1)
        self._recent = torch.cat([self._recent, self._rows(available)])[-max(self.items_between, self.batch_size) :]
        self._drawn += torch.bincount(groups, minlength=self.num_groups)
        self._since += len(groups)
        return groups.view(available.shape[:-1])

    def observe(self, group: int, gradients: Gradients) -> None:
        """Takes note of the gradients of a training step on items of `group`, by name or in a fixed order."""
        check(0 <= group < self.num_groups, f"group must lie in 0 to {self.num_groups - 1}, not {group}.")
        with record_function("gradsieve.gradient_store"):
            self.store.add(group, gradients)

    def step(self) -> GroupRecord | None:
        """After a training step. A record if K items were drawn since psi's last update, which it then makes."""
        self.steps += 1
        if not self.world.told(int(self._since >= self.items_between)):
            return None
        rewards = self.store.rewards(self.target_group, cosine=self.cosine, world=self.world).cpu()
        finite = rewards.isfinite().all()
        for _ in range(self.updates):
            picked = torch.randint(len(self._recent), (self.batch_size,), generator=self.generator)
            rows = self._recent[picked]
            log_prob = group_log_probabilities(self.scorer(rows.float()), rows)
            objective = group_objective(log_prob, self.reward_scale * rewards, self.psi_gradient)
            if learned(self.scorer_optimizer):
                finite = finite & climb(self.scorer_optimizer, objective, finite)
        self.world.alike(self.scorer)  # each has looked at its own items
        self._skipped += int(not finite)
        usage = self.probabilities(self._recent).mean(0)
        record = GroupRecord(self.steps, rewards, usage, self._drawn.clone(), bool(finite))
        self._since = 0
        self._drawn.zero_()
        return record

    def imitate(
        self, distribution: Callable[[Tensor], Tensor], available: Tensor, *, passes: int = 20, lr: float = 1e-3
    ) -> float:
        """A prior: teaches the scorer ``distribution(available) -> (N, n)`` by mean squared error, and returns that."""
        psi = list(self.scorer.parameters())
        check(bool(psi), "the scorer has no parameters to imitate anything with.")
        rows = self._rows(available)
        optimizer = Adam(psi, lr=lr)
        error = torch.zeros(())
        for _ in range(passes):
            order = torch.randperm(len(rows), generator=self.generator)
            for batch in rows[order].split(self.batch_size):
                p = group_log_probabilities(self.scorer(batch.float()), batch).exp()
                error = F.mse_loss(p, distribution(batch).detach())
                optimizer.zero_grad()
                error.backward()
                optimizer.step()
        optimizer.zero_grad()
        return error.item()

    @property
    def skipped(self) -> int:
        """How many updates were held back because a reward or psi's gradient was not finite."""
        return self._skipped

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "since": self._since,
            "skipped": self._skipped,
            "recent": self._recent,
            "drawn": self._drawn.clone(),
            "scorer": self.scorer.state_dict(),
            "scorer_optimizer": self.scorer_optimizer.state_dict(),
            "store": self.store.state_dict(),
            "random": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._since, self._skipped = state["steps"], state["since"], state["skipped"]
        self._recent, self._drawn = state["recent"].clone(), state["drawn"].clone()
        self.scorer.load_state_dict(state["scorer"])
        load_optimizer(self.scorer_optimizer, state["scorer_optimizer"])
        self.store.load_state_dict(state["store"])
        self.generator.set_state(state["random"].cpu())

    def _rows(self, available: Tensor) -> Tensor:
        shape = tuple(available.shape)
        check(
            shape[-1:] == (self.num_groups,), f"available must end in {self.num_groups} groups, not have shape {shape}."
        )
        rows = available.cpu().bool().reshape(-1, self.num_groups)
        check(bool(rows.any(1).all()), "an item is available in no group; leave such items out.")
        return rows
