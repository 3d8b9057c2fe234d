"""What turns a block's hidden rows into logits, tokens and confidences: vocabulary map, sequential and confidence head.

The heads' rules: DSpark, sections 3.1 and 3.2 of its paper. Knows nothing of attention or sessions. Invariant: the
confidence of a slot looks at the token before it, never at the slot's own, so cutting a block by it is lossless.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_service.feature_drafters.description import Description, UnusableCheckpoint
from outrider_kernels.block_sampler import GatedHead, MarkovHead, RnnHead, State, VanillaHead

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """A reduced draft vocabulary: target id = draft id + d2t[draft id]. target_ids [draft vocab] int64."""

    target_ids: Tensor
    vocab_size: int

    @staticmethod
    def of(d2t: Tensor, vocab_size: int, t2d: Tensor | None = None) -> "VocabularyMap":
        ids = torch.arange(len(d2t)) + d2t.to(torch.int64)
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= vocab_size:
            raise UnusableCheckpoint(f"d2t maps to ids {lowest}..{highest}, the target has {vocab_size}")
        if len(set(ids.tolist())) != len(ids):
            raise UnusableCheckpoint("d2t maps two draft ids to one target id: are these ids, not offsets?")
        if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), ids.sort().values):
            raise UnusableCheckpoint("d2t and t2d disagree on which ids are in the draft vocabulary")
        return VocabularyMap(ids, vocab_size)

    def spread(self, logits: Tensor) -> Tensor:
        """[..., vocab] of [..., draft vocab]: what is outside can never be drafted."""
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return full.index_copy_(-1, self.target_ids.to(logits.device), logits)

    def spread_rows(self, weight: Tensor) -> Tensor:
        """[vocab, n] of [draft vocab, n], zero outside."""
        full = weight.new_zeros(self.vocab_size, weight.shape[1])
        return full.index_copy_(0, self.target_ids.to(weight.device), weight)


@dataclass(frozen=True, slots=True)
class ConfidenceHead:
    """weight [1, hidden + rank] with tokens, [1, hidden] without; embed [vocab, rank] is the sequential head's."""

    weight: Tensor
    bias: Tensor | None
    embed: Tensor | None

    def logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """[S, n] of hidden [S, n, d] and the tokens before each slot [S, n]; their sigmoid is the confidence."""
        rows = hidden if self.embed is None else torch.cat([hidden, self.embed[previous]], dim=-1)
        return torch.nn.functional.linear(rows, self.weight, self.bias).squeeze(-1)


def markov_head(description: Description, tensors: Tensors, vocabulary: VocabularyMap | None) -> MarkovHead:
    """Over the target's vocabulary. Without a sequential head the bias is empty: rank 0."""
    if description.head == "none":
        nothing = tensors["norm.weight"].new_empty(description.vocab_size, 0)
        return VanillaHead(nothing, nothing)
    embed, out = tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"]
    out = out if vocabulary is None else vocabulary.spread_rows(out)
    if description.head == "gated":
        return GatedHead(embed, out, *_linear(tensors, "markov_head.gate_proj"))
    if description.head == "rnn":
        return RnnHead(embed, out, *_linear(tensors, "markov_head.joint_proj"))
    return VanillaHead(embed, out)


def confidence_head(description: Description, tensors: Tensors) -> ConfidenceHead | None:
    if description.confidence == "none":
        return None
    with_tokens = description.confidence == "hidden_and_token"
    embed = tensors["markov_head.markov_w1.weight"] if with_tokens else None
    bias = tensors.get("confidence_head.proj.bias")  # absent in some files
    return ConfidenceHead(tensors["confidence_head.proj.weight"], bias, embed)


def head_names(description: Description) -> set[str]:
    """The tensors that a description's heads cannot do without."""
    markov = {"none": (), "vanilla": ("markov_w1", "markov_w2")}
    markov["gated"] = (*markov["vanilla"], "gate_proj")
    markov["rnn"] = (*markov["vanilla"], "joint_proj")
    names = {f"markov_head.{part}.weight" for part in markov[description.head]}
    names |= {f"markov_head.{part}.bias" for part in markov[description.head] if part.endswith("proj")}
    return names if description.confidence == "none" else names | {"confidence_head.proj.weight"}


def corrected_logits(base_logits: Tensor, previous: Tensor, head: MarkovHead, hidden: Tensor) -> Tensor:
    """[S, n, vocab]: the logits along given tokens, as training sees them. previous [S, n]: the token before each
    slot. What block_sampler.sample_block computes while it chooses."""
    state: State = None
    rows = []
    for slot in range(base_logits.shape[1]):
        code, state = head.code(state, previous[:, slot], hidden[:, slot])
        rows.append(torch.addmm(base_logits[:, slot], code, head.out.T))
    return torch.stack(rows, dim=1)


def _linear(tensors: Tensors, name: str) -> tuple[Tensor, Tensor]:
    return tensors[f"{name}.weight"], tensors[f"{name}.bias"]
