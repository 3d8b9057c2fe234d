"""The block sampler in Triton: bias, temperature, noise and argmax of a slot in one pass over the head's matrix.

Same contract as block_sampler.py. Greedy and coupled drafts without filters never see their logits written down;
sessions that filter or draw take the path through the logits. Scores are not relative to the row's best here, so that a
race may fall differently than in torch within a few units in the last place of the logits; a draft changes only speed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_kernels.accept import SamplingRows
from outrider_kernels.block_sampler import MarkovHead, SampledBlock
from outrider_kernels.draft_choice import choose_drafts, drawn_sessions
from outrider_kernels.gumbel_race import RACE
from outrider_kernels.gumbel_race_triton import noise_of_words, reduce_races
from outrider_kernels.philox_triton import philox_words
from outrider_kernels.sparse_draft import SUPPORT_SIZE, SparseRows
from outrider_kernels.target_distribution import GREEDY_TEMPERATURE

_RACE = tl.constexpr(RACE)
_SESSIONS = 16  # per program, which all share what it reads of the head's matrix
_TOKENS = 32  # per tile: float64 logarithms of noise take many registers
_RANKS = 16  # summed at once
_SPLITS = 64  # programs per group of sessions at most


@triton.jit
def slot_kernel(
    base,
    codes,
    out,
    temperatures,
    keys,
    positions,
    choices,
    values,
    ids,
    sessions,
    vocab,
    rank,
    base_stride,
    splits,
    greedy_below,
    SESSIONS: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Program (group, split): the best token of each of its sessions in its part of the vocabulary, [splits, sessions].

    base [sessions, vocab] with base_stride, codes [sessions, rank], out [vocab, rank], all float32.
    """
    session = tl.program_id(0) * SESSIONS + tl.arange(0, SESSIONS)
    split = tl.program_id(1)
    live = session < sessions
    temperature = tl.load(temperatures + session, live, 1.0)
    key, position = tl.load(keys + session, live, 0), tl.load(positions + session, live, 0)
    choice = tl.load(choices + session, live, 0)
    greedy = temperature < greedy_below
    divisor = tl.where(greedy, 1.0, temperature)
    tiles = tl.cdiv(tl.cdiv(vocab, TOKENS), splits)
    best = tl.full([SESSIONS], -float("inf"), tl.float32)
    best_id = tl.zeros([SESSIONS], tl.int64)
    zero = tl.zeros([SESSIONS, TOKENS // 4], tl.uint32)
    for tile in range(tiles):
        first = (split * tiles + tile) * TOKENS
        token = first + tl.arange(0, TOKENS)
        known = token < vocab
        bias = tl.zeros([SESSIONS, TOKENS], tl.float32)
        for r in range(0, rank, RANKS):
            ranks = r + tl.arange(0, RANKS)
            code = tl.load(
                codes + session[:, None] * rank + ranks[None, :], live[:, None] & (ranks < rank)[None, :], 0.0
            )
            rows = tl.load(
                out + token[None, :].to(tl.int64) * rank + ranks[:, None], known[None, :] & (ranks < rank)[:, None], 0.0
            )
            bias = tl.dot(code, rows, bias, input_precision="ieee")
        at = session[:, None].to(tl.int64) * base_stride + token[None, :]
        logits = tl.load(base + at, live[:, None] & known[None, :], -float("inf")) + bias
        blocks = (first // 4 + tl.arange(0, TOKENS // 4)).to(tl.uint32)
        w0, w1, w2, w3 = philox_words(
            zero + blocks[None, :],
            zero + position.to(tl.uint32)[:, None],
            zero + choice.to(tl.uint32)[:, None],
            zero + _RACE,
            zero + key.to(tl.uint32)[:, None],
            zero + (key >> 32).to(tl.uint32)[:, None],
        )
        noise = noise_of_words(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
        scores = tl.div_rn(logits, tl.zeros([SESSIONS, TOKENS], tl.float32) + divisor[:, None])
        scores = tl.where(greedy[:, None], logits, scores + noise)
        tile_best, place = tl.max(scores, 1, return_indices=True)
        better = tile_best > best
        best_id = tl.where(better, (first + place).to(tl.int64), best_id)
        best = tl.where(better, tile_best, best)
    tl.store(values + split * sessions + session, best, live)
    tl.store(ids + split * sessions + session, best_id, live)


def sample_block(
    base_logits: Tensor,
    anchor: Tensor,
    head: MarkovHead,
    sampling: SamplingRows,
    hidden: Tensor | None = None,
    size: int = SUPPORT_SIZE,
) -> SampledBlock:
    """As block_sampler.sample_block."""
    previous, state = anchor, None
    tokens, laws = [], []
    fused = _fits_one_pass(sampling, base_logits.shape[-1])
    for slot in range(base_logits.shape[1]):
        code, state = head.code(state, previous, None if hidden is None else hidden[:, slot])
        if fused:
            previous, law = _choose_in_one_pass(base_logits[:, slot], code, head.out, sampling, slot)
        else:
            logits = torch.addmm(base_logits[:, slot], code, head.out.T)
            previous, law = choose_drafts(logits, sampling, slot, size)
        tokens.append(previous)
        laws.append(law)
    return SampledBlock(torch.stack(tokens, dim=1) if tokens else anchor[:, None][:, :0], laws)


def _fits_one_pass(sampling: SamplingRows, vocab: int) -> bool:
    """Whether no session filters its tokens or draws from a distribution that has to be shipped."""
    sampled = sampling.temperature >= GREEDY_TEMPERATURE
    filtered = ((sampling.top_k > 0) & (sampling.top_k < vocab)) | (sampling.top_p < 1)
    return not bool((drawn_sessions(sampling) | (sampled & filtered)).any())


def _choose_in_one_pass(
    base: Tensor, code: Tensor, out: Tensor, sampling: SamplingRows, slot: int
) -> tuple[Tensor, SparseRows]:
    sessions, vocab = base.shape
    splits = max(1, min(_SPLITS, triton.cdiv(vocab, _TOKENS)))
    values = torch.empty(splits, sessions, dtype=torch.float32, device=base.device)
    ids = torch.empty(splits, sessions, dtype=torch.int64, device=base.device)
    if sessions:
        assert base.stride(1) == 1
        slot_kernel[(triton.cdiv(sessions, _SESSIONS), splits)](
            base,
            code.contiguous(),
            out.contiguous(),
            sampling.temperature.contiguous(),
            sampling.key.contiguous(),
            (sampling.base_len + slot).contiguous(),
            sampling.choice.contiguous(),
            values,
            ids,
            sessions,
            vocab,
            code.shape[-1],
            base.stride(0),
            splits,
            GREEDY_TEMPERATURE,
            SESSIONS=_SESSIONS,
            TOKENS=_TOKENS,
            RANKS=_RANKS,
        )
    none = torch.zeros(sessions, 0, dtype=torch.int64, device=base.device)
    return reduce_races(values, ids), SparseRows(none, none)
