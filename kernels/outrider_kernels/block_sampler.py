"""Chooses the tokens of a semi-autoregressive drafter's block from left to right, many sessions at once.

One parallel pass has given logits for every slot; what is sequential is a low-rank bias that depends on the token
before (DSpark's Markov heads). Knows nothing of the pass itself. This file is the contract and the torch path.

    logits_k = base_k + W2 code_k,    code_k = f(w1[token_{k-1}], hidden_k, state)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider_kernels.accept import SamplingRows
from outrider_kernels.draft_choice import choose_drafts
from outrider_kernels.sparse_draft import SUPPORT_SIZE, SparseRows

State = Tensor | None


class MarkovHead(Protocol):
    """`out` [vocab, rank] is W2. `code` maps the state, the tokens before [S] int64 and the slot's hidden rows [S, d]
    to the codes [S, rank] float32 and the state of the next slot; a block starts with the state None."""

    @property
    def out(self) -> Tensor: ...

    def code(self, state: State, previous: Tensor, hidden: Tensor | None) -> tuple[Tensor, State]: ...


@dataclass(frozen=True, slots=True)
class VanillaHead:
    """A bigram table of low rank: code = w1[previous]. embed [vocab, rank] is w1."""

    embed: Tensor
    out: Tensor

    def code(self, state: State, previous: Tensor, hidden: Tensor | None) -> tuple[Tensor, State]:
        return self.embed[previous], None


@dataclass(frozen=True, slots=True)
class GatedHead:
    """code = sigmoid(gate [hidden; e] + bias) * e with e = w1[previous]. gate [rank, d + rank], bias [rank]."""

    embed: Tensor
    out: Tensor
    gate: Tensor
    bias: Tensor

    def code(self, state: State, previous: Tensor, hidden: Tensor | None) -> tuple[Tensor, State]:
        assert hidden is not None
        embedded = self.embed[previous]
        gate = torch.nn.functional.linear(torch.cat([hidden, embedded], dim=-1), self.gate, self.bias)
        return gate.sigmoid() * embedded, None


@dataclass(frozen=True, slots=True)
class RnnHead:
    """(G, C, O) = joint [state; e; hidden] + bias; code = tanh(O), which uses the old state;
    next state = sigmoid(G) state + (1 - sigmoid(G)) tanh(C). joint [3 rank, 2 rank + d], bias [3 rank]."""

    embed: Tensor
    out: Tensor
    joint: Tensor
    bias: Tensor

    def code(self, state: State, previous: Tensor, hidden: Tensor | None) -> tuple[Tensor, State]:
        assert hidden is not None
        embedded = self.embed[previous]
        held = torch.zeros_like(embedded) if state is None else state
        joint = torch.nn.functional.linear(torch.cat([held, embedded, hidden], dim=-1), self.joint, self.bias)
        gate, candidate, out = joint.chunk(3, dim=-1)
        kept = gate.sigmoid()
        return out.tanh(), kept * held + (1 - kept) * candidate.tanh()


@dataclass(frozen=True, slots=True)
class SampledBlock:
    """S sessions' blocks of B tokens. laws[k] is what token k was drawn from, count 0 for point drafts."""

    token_ids: Tensor  # [S, B] int64
    laws: Sequence[SparseRows]  # B times [S, m]


def sample_block(
    base_logits: Tensor,
    anchor: Tensor,
    head: MarkovHead,
    sampling: SamplingRows,
    hidden: Tensor | None = None,
    size: int = SUPPORT_SIZE,
) -> SampledBlock:
    """base_logits [S, B, vocab] float32; anchor [S] int64, the token before the block; hidden [S, B, d] for the heads
    that look at it. Token k of a session goes to position base_len + k, greedy, raced or drawn as its sampling says."""
    previous, state = anchor, None
    tokens, laws = [], []
    for slot in range(base_logits.shape[1]):
        code, state = head.code(state, previous, None if hidden is None else hidden[:, slot])
        logits = torch.addmm(base_logits[:, slot], code, head.out.T)
        previous, law = choose_drafts(logits, sampling, slot, size)
        tokens.append(previous)
        laws.append(law)
    return SampledBlock(torch.stack(tokens, dim=1) if tokens else anchor[:, None][:, :0], laws)
