"""grad[S_i] of Algorithm 2: a decayed sum of gradients for each group, whole or as a random projection."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import GradsieveError
from .parallel import ALONE, World, local

Gradients = Mapping[str, Tensor] | Sequence[Tensor]


class GradientStore:
    """One flat vector for each group, in `dtype`, on the device of the first gradient that is observed.

    Memory: ``num_groups`` times the observed parameters times 4 bytes, 2 in bfloat16. With a projection ``num_groups``
    times `projection` times that, and 4 bytes for each observed parameter once.

    Args:
        decay: alpha_1 and alpha_2, ``grad[S_i] <- alpha_1 grad[S_i] + alpha_2 g``.
        dtype: float32 or bfloat16.
        projection: length of a random projection, by signed buckets (Charikar et al., 2002), that keeps dot products
            in the mean, with a standard error of about ``|a| |b| / sqrt(projection)``; None for the whole gradient.
        seed: of the projection.
    """

    def __init__(
        self,
        num_groups: int,
        *,
        decay: tuple[float, float] = (0.5, 1.0),
        dtype: torch.dtype = torch.float32,
        projection: int | None = None,
        seed: int = 0,
    ):
        if dtype not in (torch.float32, torch.bfloat16):
            raise GradsieveError(f"gradients are stored in float32 or bfloat16, not {dtype}.")
        if projection is not None and projection < 1:
            raise GradsieveError(f"projection must be at least 1 or None, not {projection}.")
        self.num_groups, self.decay, self.dtype, self.projection, self.seed = num_groups, decay, dtype, projection, seed
        self.vectors: Tensor | None = None  # (n, P or projection)
        self._buckets: Tensor | None = None  # (P,), twice the bucket, plus one where the sign is negative

    def add(self, group: int, gradients: Gradients) -> None:
        """The line ``grad[S_i] <- alpha_1 grad[S_i] + alpha_2 g`` of Algorithm 2."""
        tensors = list(gradients.values() if isinstance(gradients, Mapping) else gradients)
        if not tensors:
            raise GradsieveError("observe() was given no gradients: call it after backward(), before zero_grad().")
        tensors = [t.to_dense() if t.is_sparse else t for t in (local(t.detach()) for t in tensors)]
        vectors = [t.flatten() for t in tensors] if self.projection is None else [self._projected(tensors)]
        length = sum(map(len, vectors))
        if self.vectors is None:
            self.vectors = torch.zeros(self.num_groups, length, dtype=self.dtype, device=vectors[0].device)
        self.vectors = self.vectors.to(vectors[0].device)  # a state that was loaded lies on the CPU
        if self.vectors.shape[1] != length:
            raise GradsieveError(
                f"observe() was given {length:,} numbers, but {self.vectors.shape[1]:,} before: "
                "give the gradients of the same parameters every time, zeros where one has none."
            )
        for part, vector in zip(self.vectors[group].split([len(v) for v in vectors]), vectors, strict=True):
            self._decay_and_add(part, vector)

    def _decay_and_add(self, part: Tensor, vector: Tensor) -> None:
        """One pass over the memory where it can be: that is most of what DDS costs here."""
        keep, take = self.decay
        vector = vector if take == 1 else take * vector
        if part.dtype == vector.dtype:
            torch.add(vector, part, alpha=keep, out=part)
        else:  # sums are made in float32: small gradients would be rounded away beside a large sum
            part.copy_(vector.float().add(part.float(), alpha=keep))

    def rewards(self, target: int, *, cosine: bool = True, world: World = ALONE) -> Tensor:
        """``grad[S_i] . grad[S]``, or its cosine, for every group, (n,). Zero for a group that was never observed.

        Of several processes each has observed its own data, and the gradients are summed; or, where parameters are
        sharded, its own part of the gradient, and the products are.
        """
        if self.vectors is None:
            return torch.zeros(self.num_groups)

        def whole(vector: Tensor) -> Tensor:  # one group at a time in float32
            return vector.float() if world.sharded else world.summed(vector.float())

        own = whole(self.vectors[target])
        found = torch.stack([torch.stack([v @ own, v @ v]) for v in map(whole, self.vectors)])  # (n, 2)
        products, squares = (world.summed(found) if world.sharded else found).unbind(1)
        return products / (squares * squares[target]).sqrt().clamp_min(1e-30) if cosine else products

    def _projected(self, tensors: Sequence[Tensor]) -> Tensor:
        assert self.projection is not None
        flat = torch.cat([t.flatten().float() for t in tensors])  # (P,)
        if self._buckets is None or len(self._buckets) != len(flat):
            generator = torch.Generator().manual_seed(self.seed)
            self._buckets = torch.randint(2 * self.projection, (len(flat),), generator=generator, dtype=torch.int32)
        self._buckets = self._buckets.to(flat.device)
        signs = 1 - 2 * (self._buckets & 1)
        return flat.new_zeros(self.projection).index_add_(0, self._buckets >> 1, signs * flat)

    def state_dict(self) -> dict[str, Any]:
        return {"vectors": self.vectors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.vectors = None if state["vectors"] is None else state["vectors"].clone()
