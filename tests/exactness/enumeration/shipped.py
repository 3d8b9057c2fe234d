"""Thousands of sessions over the enumerated models, through the shipped acceptance functions.

Sessions differ by their key only. Contexts are nodes of a ternary tree (child of node n by token t: 3 n + 1 + t), so
that a round of all sessions is a few table lookups. Every part that a violation may replace is a field of `Way`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

import torch
from torch import Tensor

from cluster.protocol.messages import SamplingParams
from outrider_kernels.accept import SamplingRows, accept_blocks, choose_tokens
from outrider_kernels.accept_sparse import accept_sparse
from outrider_kernels.sparse_draft import DraftSupports, SparseRows, draft_sparse
from outrider_kernels.target_distribution import target_distribution
from tests.exactness.enumeration.laws import DEPTH, LENGTH, VOCAB, Model, Text, TextLaw, contexts, texts
from tests.exactness.enumeration.policies import Policy, Round, all_verified

NODES = sum(VOCAB**level for level in range(LENGTH))  # contexts; the whole texts follow them
CONTEXTS: Sequence[Text] = [*contexts(), *texts()]
LEVEL = torch.tensor([len(text) for text in CONTEXTS])

# (committed nodes [S], sampling) -> (tokens [S, DEPTH], what each was drawn from or None)
DraftBlocks: TypeAlias = Callable[[Tensor, SamplingRows], tuple[Tensor, list[SparseRows] | None]]
# (logits, row_starts, draft_ids, sampling, supports) -> (num_accepted, next_token)
Judge: TypeAlias = Callable[[Tensor, Tensor, Tensor, SamplingRows, DraftSupports | None], tuple[Tensor, Tensor]]


def table(model: Model) -> Tensor:
    """[NODES, VOCAB] float32 log-probabilities; -inf for what cannot be."""
    return torch.tensor([[float(share) for share in model[context]] for context in contexts()]).log()


def child(node: Tensor, token: Tensor) -> Tensor:
    return VOCAB * node + 1 + token


@dataclass(frozen=True)
class Way:
    """One way of writing texts. `logits(committed, row)` [n, VOCAB] are the target's at a row's node, given the node of
    the text that its round began with."""

    logits: Callable[[Tensor, Tensor], Tensor]
    draft: DraftBlocks
    drafter: Model  # for the policy
    sampling: SamplingParams
    policy: Policy = all_verified
    judge: Judge = accept_blocks


@dataclass(frozen=True)
class Rounds:
    """What one round of S sessions did; [S] each, blocks [S, DEPTH]."""

    blocks: Tensor
    depths: Tensor
    accepted: Tensor
    following: Tensor
    after: Tensor  # nodes


def logits_of(target: Model) -> Callable[[Tensor, Tensor], Tensor]:
    logits = table(target)
    return lambda committed, row: logits[row]


def keyed(count: int, sampling: SamplingParams, seed: int) -> SamplingRows:
    """A row per session, each with a key of its own."""
    rows = SamplingRows.of([sampling], [1]).take(torch.zeros(count, dtype=torch.int64))
    keys = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))
    return replace(rows, key=keys)


def one_round(way: Way, node: Tensor, rows: SamplingRows, last: Tensor, generator: torch.Generator) -> Rounds:
    """Draft, cut by the policy, judge. A block leaves room for the token that follows it."""
    rows = replace(rows, base_len=LEVEL[node] + 1)  # a prompt of one token
    tokens, laws = way.draft(node, rows)
    depths = _verified(way, node, tokens, last, generator)
    reached = [node]
    for index in range(DEPTH):
        reached.append(child(reached[-1], tokens[:, index]))
    path = torch.stack(reached, dim=1)  # [S, DEPTH + 1]
    place = torch.arange(DEPTH + 1)
    judged = place <= depths[:, None]
    drafts = torch.where(place < depths[:, None], torch.nn.functional.pad(tokens, (0, 1)), -1)
    starts = torch.nn.functional.pad((depths + 1).cumsum(0), (1, 0))
    committed = node[:, None].expand(-1, DEPTH + 1)
    supports = None if laws is None else flat_supports(laws, depths)
    logits = way.logits(committed[judged], path[judged])
    accepted, following = way.judge(logits, starts, drafts[judged], rows, supports)
    after = child(path.gather(1, accepted[:, None])[:, 0], following)
    return Rounds(tokens, depths, accepted, following, after)


def written(way: Way, count: int, seed: int) -> Tensor:
    """[VOCAB^LENGTH] how many of `count` sessions wrote each text of LENGTH tokens, in the order of `texts()`."""
    rows = keyed(count, way.sampling, seed)
    generator = torch.Generator().manual_seed(seed)
    node, last = torch.zeros(count, dtype=torch.int64), torch.full((count,), -1)
    while (going := (LEVEL[node] < LENGTH).nonzero().flatten()).numel():
        done = one_round(way, node[going], rows.take(going), last[going], generator)
        node[going], last[going] = done.after, done.accepted
    return (node - NODES).bincount(minlength=VOCAB**LENGTH)


def as_tensor(law: TextLaw) -> Tensor:
    return torch.tensor([float(law.get(text, Fraction(0))) for text in texts()], dtype=torch.float64)


def _verified(way: Way, node: Tensor, tokens: Tensor, last: Tensor, generator: torch.Generator) -> Tensor:
    """[S] depths: the policy asked once for each thing that it may see."""
    code = torch.cat([node[:, None], last[:, None], tokens], dim=1)
    cases, which = torch.unique(code, dim=0, return_inverse=True)
    odds = torch.zeros(len(cases), DEPTH + 1)
    for case, (at, before, *block) in enumerate(cases.tolist()):
        text = CONTEXTS[at]
        round_ = Round(way.drafter, text, tuple(block[: LENGTH - len(text) - 1]), before if before >= 0 else None)
        for depth, share in way.policy(round_).items():
            odds[case, depth] = float(share)
    chosen: Tensor = (torch.rand(len(which), generator=generator)[:, None] >= odds.cumsum(-1)[which]).sum(-1)
    return chosen.clamp(max=DEPTH)


def flat_supports(laws: list[SparseRows], depths: Tensor) -> DraftSupports:
    """Of the first depths[s] tokens of each block, with an empty row after them."""
    ids = torch.nn.functional.pad(torch.stack([law.ids for law in laws], dim=1), (0, 0, 0, 1))
    counts = torch.nn.functional.pad(torch.stack([law.counts for law in laws], dim=1), (0, 0, 0, 1))
    place = torch.arange(DEPTH + 1)
    counts = torch.where((place < depths[:, None])[..., None], counts, 0)
    rows = place <= depths[:, None]
    ids, counts = ids[rows], counts[rows]
    starts = torch.nn.functional.pad((counts > 0).sum(dim=-1).cumsum(0), (1, 0))
    return DraftSupports(starts, ids[counts > 0], counts[counts > 0])


# --- drafters ------------------------------------------------------------------------------------------------------


def step_by_step(step: Callable[[Tensor, SamplingRows, int], tuple[Tensor, SparseRows | None]]) -> DraftBlocks:
    """Blocks from a drafter that draws one token a session: step(nodes, sampling, index in block)."""

    def draft(node: Tensor, rows: SamplingRows) -> tuple[Tensor, list[SparseRows] | None]:
        tokens, laws = [], []
        for index in range(DEPTH):
            # Past the end of the text anything may be drafted: it is never verified.
            token, law = step(node.clamp(max=NODES - 1), rows, index)
            tokens.append(token)
            if law is not None:
                laws.append(law)
            node = child(node, token)
        return torch.stack(tokens, dim=1), laws or None

    return draft


def sampling_drafter(drafter: Model, kept: int = VOCAB) -> DraftBlocks:
    """As shipped: quantised, drawn from, sent along."""
    logits = table(drafter)

    def step(node: Tensor, rows: SamplingRows, index: int) -> tuple[Tensor, SparseRows]:
        return draft_sparse(logits[node], rows.base_len, torch.full_like(node, index), rows.key, rows.choice, kept)

    return step_by_step(step)


def racing_drafter(drafter: Model) -> DraftBlocks:
    """As shipped for the coupled rule: the drafter's own choice with the target's noise."""
    logits = table(drafter)
    return step_by_step(lambda node, rows, index: (choose_tokens(logits[node], rows, rows.base_len + index), None))


def point_drafter(drafter: Model) -> DraftBlocks:
    best = table(drafter).argmax(dim=-1)
    return step_by_step(lambda node, rows, index: (best[node], None))


def judge_by_token(
    logits: Tensor, row_starts: Tensor, draft_ids: Tensor, rows: SamplingRows, supports: DraftSupports | None
) -> tuple[Tensor, Tensor]:
    """The token rule, which the shipped default replaces by block verification."""
    assert supports is not None
    sessions = torch.arange(len(rows.key)).repeat_interleave(row_starts.diff())
    each = rows.take(sessions)
    log_target = target_distribution(logits, each.temperature, each.top_k, each.top_p)
    held = supports.padded(torch.arange(len(logits)))
    return accept_sparse(log_target, row_starts, draft_ids, held, rows.base_len, rows.key, rows.choice, rule="token")
