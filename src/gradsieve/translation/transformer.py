"""A small Transformer under the contract of a translator."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import GradsieveError
from .translator import State, Translator, real_pieces


def sinusoids(first: int, count: int, like: Tensor) -> Tensor:
    """Position codes (count, D) of the places from `first` on; computed each time, so that no sentence is too long."""
    places = torch.arange(first, first + count, dtype=like.dtype, device=like.device)
    pairs = torch.arange(0, like.shape[-1], 2, dtype=like.dtype, device=like.device)
    angles = places[:, None] * 10000 ** (-pairs / like.shape[-1])  # (count, D / 2)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


class _Attention(nn.Module):
    """Many heads, over keys and values (B, S, 2D) that were projected before: decoding projects each piece once.

    Not nn.MultiheadAttention: its inference path has no forward-mode derivative, so 'jvp' would fail in eval mode.
    """

    def __init__(self, size: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(size, size)
        self.merge = nn.Linear(size, size)

    def forward(self, x: Tensor, projected: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.query(x), *projected.chunk(2, dim=-1))
        )  # (B, heads, T or S, D / heads)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.merge(attended.transpose(1, 2).flatten(2))  # (B, T, D)


class _Block(nn.Module):
    """Pre-norm: attention to oneself, to the source (in a decoder), then two linear layers, each added to its input."""

    def __init__(self, size: int, heads: int, dropout: float, *, decoder: bool):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(3 if decoder else 2))
        self.project = nn.Linear(size, 2 * size)
        self.attention = _Attention(size, heads)
        self.source_attention = _Attention(size, heads) if decoder else None
        self.feed_forward = nn.Sequential(nn.Linear(size, 4 * size), nn.ReLU(), nn.Linear(4 * size, size))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None, past: Tensor | None = None, source: State | None = None
    ) -> tuple[Tensor, Tensor]:
        """X (B, T, D), and the projections (B, P, 2D) of the P pieces before it -> x, and those of all P + T."""
        normed = self.norms[0](x)
        seen = self.project(normed)
        seen = seen if past is None else torch.cat([past, seen], 1)  # (B, P + T, 2D)
        x = x + self.dropout(self.attention(normed, seen, mask))
        if self.source_attention is not None and source is not None:
            x = x + self.dropout(self.source_attention(self.norms[1](x), source["projected"], source["mask"]))
        return x + self.dropout(self.feed_forward(self.norms[-1](x))), seen


class TransformerTranslator(Translator):
    """A small Transformer, pre-norm, with sinusoidal positions; embeddings have the size of the hidden layers."""

    def __init__(
        self,
        source_size: int,
        target_size: int,
        *,
        hidden: int = 256,
        layers: int = 3,
        heads: int = 4,
        dropout: float = 0.3,
    ):
        super().__init__()
        if hidden % (2 * heads):
            raise GradsieveError(
                f"a Transformer of {heads} heads needs a hidden size that {2 * heads} divides, not {hidden}."
            )
        self.source_embedding = nn.Embedding(source_size, hidden)
        self.target_embedding = nn.Embedding(target_size, hidden)
        self.encoder = nn.ModuleList(_Block(hidden, heads, dropout, decoder=False) for _ in range(layers))
        self.decoder = nn.ModuleList(_Block(hidden, heads, dropout, decoder=True) for _ in range(layers))
        self.source_project = nn.Linear(hidden, layers * 2 * hidden)  # for all layers of the decoder at once
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, target_size)
        self.dropout = nn.Dropout(dropout)
        for name, p in self.named_parameters():
            if "embedding" in name:
                nn.init.normal_(p, std=hidden**-0.5)
            elif p.ndim > 1:
                nn.init.xavier_uniform_(p)

    def encode(self, source: Tensor, source_lengths: Tensor) -> State:
        mask = real_pieces(source, source_lengths)[:, None, None]  # (B, 1, 1, S)
        x = self._embedded(self.source_embedding(source), 0)
        for block in self.encoder:
            x, _ = block(x, mask)
        projected = self.source_project(self.encoder_norm(x)).chunk(len(self.decoder), -1)  # each (B, S, 2D)
        return {"mask": mask, **_by_layer(projected)}

    def start(self, memory: State) -> State:
        return _by_layer([memory[str(i)][:, :0] for i in range(len(self.decoder))])

    def decode(self, memory: State, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        past, count = state["0"].shape[1], tokens.shape[1]
        mask = torch.ones(count, past + count, dtype=torch.bool, device=tokens.device).tril(past)
        x = self._embedded(self.target_embedding(tokens), past)
        seen = []
        for i, block in enumerate(self.decoder):
            x, its = block(x, mask, state[str(i)], {"projected": memory[str(i)], "mask": memory["mask"]})
            seen.append(its)
        return self.decoder_norm(x), _by_layer(seen)

    def _embedded(self, x: Tensor, first: int) -> Tensor:
        return self.dropout(x * x.shape[-1] ** 0.5 + sinusoids(first, x.shape[1], x))  # (B, T, D)


def _by_layer(tensors: Iterable[Tensor]) -> State:
    return {str(i): value for i, value in enumerate(tensors)}
