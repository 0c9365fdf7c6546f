"""Translators, the paper's LSTM first, and their loss per sentence pair.

A translator has two halves. `encode` reads the source once and gives the memory; `decode` reads target pieces, any
number of them, from a state, and gives features and the state after them. Training decodes the whole target in one
call, teacher-forced; beam search calls the same code piece by piece. So what is searched is what was trained, and
nothing loops over time in Python.

Memory and state are dictionaries of tensors with the sentence (or the beam) first, so `reordered` serves both.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import GradsieveError
from .vocabulary import PAD

State = dict[str, Tensor]


class TranslationBatch(NamedTuple):
    """B sentence pairs, padded with `PAD`. A source has one piece at least; a target begins with BOS, ends with EOS."""

    source: Tensor  # (B, S)
    source_lengths: Tensor  # (B,)
    target: Tensor  # (B, T + 1)


def reordered(state: State, index: Tensor) -> State:
    """The state (or memory) whose row i is row index[i] of this one."""
    return {name: value[index] for name, value in state.items()}


def real_pieces(source: Tensor, source_lengths: Tensor) -> Tensor:
    """True where the source is no padding."""
    places = torch.arange(source.shape[1], device=source.device)
    return places < source_lengths.to(source.device)[:, None]  # (B, S)


def reversed_within(x: Tensor, real: Tensor) -> Tensor:
    """X (B, S, D) with each row's real places in reverse order, its padding where it was."""
    places = torch.arange(x.shape[1], device=x.device)
    mirrored = torch.where(real, real.sum(1, keepdim=True) - 1 - places, places)  # (B, S)
    return x.gather(1, mirrored[:, :, None].expand_as(x))


class Translator(nn.Module):
    """What the loss and the beam search need of a model."""

    output: nn.Linear

    def encode(self, source: Tensor, source_lengths: Tensor) -> State:
        """Source (B, S) -> memory, which later steps only read."""
        raise NotImplementedError

    def start(self, memory: State) -> State:
        """The state before the first target piece."""
        raise NotImplementedError

    def decode(self, memory: State, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Tokens (B, T) that follow the state -> features (B, T, H) that predict what follows each, new state."""
        raise NotImplementedError

    def step(self, memory: State, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """One token (B,) per row -> log-probabilities (B, V) of the next, new state."""
        features, state = self.decode(memory, state, tokens[:, None])
        return self.output(features[:, 0]).log_softmax(-1), state

    def forward(self, source: Tensor, source_lengths: Tensor, target_in: Tensor, keep: Tensor | None = None) -> Tensor:
        """Logits (B, T, V); only those of the N places where `keep` (B, T) is true, (N, V), if it is given.

        The output layer is the dearest part on a CPU, and a padded batch would spend it on places that nobody reads.
        """
        memory = self.encode(source, source_lengths)
        features, _ = self.decode(memory, self.start(memory), target_in)  # (B, T, H)
        return self.output(features if keep is None else features[keep])


class LSTMTranslator(Translator):
    """The paper's: one-layer bidirectional LSTM encoder, one-layer LSTM decoder, attention.

    Attention is Luong's, bilinear, over the states of the whole target at once. Input feeding would make each step
    wait for the attention of the step before, in a Python loop, and is left out.

    Padding stands behind each sentence in both directions: the second LSTM reads the source reversed within its own
    length, and what follows the end is masked. Packed sequences would do the same, but have no forward-mode
    derivative, want the lengths on the CPU, and were slower there wherever lengths differed.
    """

    def __init__(
        self, source_size: int, target_size: int, *, hidden: int = 512, embedding: int = 128, dropout: float = 0.3
    ):
        super().__init__()
        self.source_embedding = nn.Embedding(source_size, embedding)
        self.target_embedding = nn.Embedding(target_size, embedding)
        self.forwards = nn.LSTM(embedding, hidden, batch_first=True)
        self.backwards = nn.LSTM(embedding, hidden, batch_first=True)
        self.bridge = nn.Linear(2 * hidden, hidden)
        self.decoder = nn.LSTM(embedding, hidden, batch_first=True)
        self.keys = nn.Linear(2 * hidden, hidden, bias=False)
        self.combine = nn.Linear(3 * hidden, hidden)
        self.output = nn.Linear(hidden, target_size)
        self.dropout = nn.Dropout(dropout)
        for p in self.parameters():
            nn.init.uniform_(p, -0.1, 0.1)

    def encode(self, source: Tensor, source_lengths: Tensor) -> State:
        real = real_pieces(source, source_lengths)  # (B, S)
        embedded = self.dropout(self.source_embedding(source))  # (B, S, E)
        there, _ = self.forwards(embedded)  # (B, S, H)
        back, _ = self.backwards(reversed_within(embedded, real))  # (B, S, H), last piece first
        values = torch.cat([there, reversed_within(back, real)], -1)  # (B, S, 2H)
        rows, last = torch.arange(len(real), device=real.device), real.sum(1) - 1
        cell = self.bridge(torch.cat([there[rows, last], back[rows, last]], -1))  # (B, H)
        return {"keys": self.keys(values), "values": values, "real": real, "cell": cell}

    def start(self, memory: State) -> State:
        return {"hidden": memory["cell"].tanh(), "cell": memory["cell"]}

    def decode(self, memory: State, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        embedded = self.dropout(self.target_embedding(tokens))  # (B, T, E)
        before = (state["hidden"][None], state["cell"][None])
        states, (hidden, cell) = self.decoder(embedded, before)  # (B, T, H)
        scores = states @ memory["keys"].transpose(1, 2)  # (B, T, S)
        attention = scores.masked_fill(~memory["real"][:, None], -torch.inf).softmax(-1)
        context = attention @ memory["values"]  # (B, T, 2H)
        features = self.combine(torch.cat([context, states], -1)).tanh()  # (B, T, H)
        return self.dropout(features), {"hidden": hidden[0], "cell": cell[0]}


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


def build_translator(
    name: str,
    source_size: int,
    target_size: int,
    *,
    hidden: int = 512,
    embedding: int = 128,
    dropout: float = 0.3,
    layers: int = 3,
    heads: int = 4,
) -> Translator:
    """``lstm`` (of which `layers` and `heads` say nothing) or ``transformer`` (`embedding`: its own is `hidden`)."""
    if name == "lstm":
        return LSTMTranslator(source_size, target_size, hidden=hidden, embedding=embedding, dropout=dropout)
    if name == "transformer":
        return TransformerTranslator(
            source_size, target_size, hidden=hidden, layers=layers, heads=heads, dropout=dropout
        )
    raise GradsieveError(f"unknown translation model {name!r}; choose lstm or transformer.")


def translation_loss(
    model: nn.Module, batch: TranslationBatch, *, reduction: str = "sum", label_smoothing: float = 0.0
) -> Tensor:
    """One loss per sentence pair, (B,): the cross entropy of its target pieces, EOS included, ``sum`` or ``mean``.

    A sum divided by the batch's count of pieces trains on pieces, as the authors do; a mean trains on sentences.
    """
    if reduction not in ("sum", "mean"):
        raise GradsieveError(f"a sentence's loss is the 'sum' or the 'mean' of its pieces' losses, not {reduction!r}.")
    given, wanted = batch.target[:, :-1], batch.target[:, 1:]  # (B, T)
    keep = wanted != PAD
    logits = model(batch.source, batch.source_lengths, given, keep)  # (N, V)
    losses = F.cross_entropy(logits, wanted[keep], reduction="none", label_smoothing=label_smoothing)  # (N,)
    rows = keep.nonzero()[:, 0]
    summed = losses.new_zeros(len(keep)).index_add(0, rows, losses)  # (B,)
    return summed if reduction == "sum" else summed / keep.sum(1)
