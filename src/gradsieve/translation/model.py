"""The paper's LSTM, and translators by name."""

import torch
from torch import Tensor, nn

from ..errors import GradsieveError
from .transformer import TransformerTranslator
from .translator import State, Translator, real_pieces, reversed_within


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
