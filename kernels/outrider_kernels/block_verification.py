"""The ratio rules for drafts with a known distribution: block verification, and the token rule it improves on.

Pure arithmetic on padded arrays [sessions, depth]; knows nothing of logits, messages or random number generators.
Whatever distribution the drafts were drawn from, what is committed follows the target's (control of bias: a token may
be cut from the block only by a rule that has not seen it).

Notation of Sun et al., arXiv 2403.10444: draft token i = 1..depth was drawn from draft_i, the target's distribution at
its place is target_i, both given the tokens before it.
    P_0 = 1, P_i = min(1, P_{i-1} target_i(x_i) / draft_i(x_i))              running_ratios
    Z_i = sum_y max(P_i target_{i+1}(y) - draft_{i+1}(y), 0)                 residual_masses
    h_i = Z_i / (Z_i + 1 - P_i) for i < depth, h_depth = P_depth             block_chances
    accepted = the last i with u_i < h_i, 0 if there is none                 accepted_by_block
    next token ~ max(P_i target_{i+1} - draft_{i+1}, 0) / Z_i at i = accepted, or target at i = depth
The token rule accepts while u_i < target_i(x_i) / draft_i(x_i) and has P_i = 1 in the law of the next token.
"""

import torch
from torch import Tensor


def running_ratios(target: Tensor, draft: Tensor) -> Tensor:
    """[sessions, depth + 1] P_0..P_depth. target, draft [sessions, depth] float64: probabilities of the draft tokens.

    draft > 0 where there is a token; places past a session's depth hold anything and are not to be read."""
    ratios = target / draft
    running = [torch.ones_like(ratios[:, :0].sum(dim=-1))]
    for ratio in ratios.unbind(dim=-1):
        running.append((running[-1] * ratio).clamp(max=1))
    return torch.stack(running, dim=-1)


def residual_masses(running: Tensor, target: Tensor, draft: Tensor) -> Tensor:
    """[sessions, depth] Z_0..Z_{depth-1} from running [sessions, depth] = P_0..P_{depth-1} and the probabilities that
    target and draft [sessions, depth, support] float64 give to the draft's support, 0 in empty places."""
    inside = (running[..., None] * target - draft).clamp(min=0).sum(dim=-1)
    # Outside its support the draft has no mass. The sum may round to just above 1.
    outside = running * (1 - target.sum(dim=-1)).clamp(min=0)
    return inside + outside


def block_chances(running: Tensor, residual: Tensor, depth: Tensor) -> Tensor:
    """[sessions, longest] h_1..h_longest from running [sessions, longest + 1], residual [sessions, longest] and each
    session's depth [sessions] int64; 0 past it."""
    index = torch.arange(1, running.shape[-1], device=running.device)
    reached = running[:, 1:]
    ahead = torch.nn.functional.pad(residual[:, 1:], (0, 1))
    # 0 / 0: all that follows is accepted for certain, so this place's chance is never decisive.
    chances = torch.where(ahead + 1 - reached > 0, ahead / (ahead + 1 - reached), 1.0)
    chances = torch.where(index == depth[:, None], reached, chances)
    return torch.where(index <= depth[:, None], chances, 0.0)


def accepted_by_block(chances: Tensor, uniforms: Tensor) -> Tensor:
    """[sessions] int64: the LAST success of u_i < h_i, both [sessions, longest]. Strict: with uniforms in [0, 1), <=
    could accept a token of target probability 0."""
    index = torch.arange(1, chances.shape[-1] + 1, device=chances.device)
    return torch.nn.functional.pad((uniforms < chances) * index, (1, 0)).amax(dim=-1)


def accepted_by_token(target: Tensor, draft: Tensor, uniforms: Tensor, depth: Tensor) -> Tensor:
    """[sessions] int64: the tokens before the FIRST failure of u_i < target_i(x_i) / draft_i(x_i); all arguments as
    above (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318)."""
    index = torch.arange(uniforms.shape[-1], device=uniforms.device)
    passed = (uniforms * draft < target) & (index < depth[:, None])
    return passed.long().cumprod(dim=-1).sum(dim=-1)


def log_residual(target: Tensor, draft: Tensor, running: Tensor) -> Tensor:
    """log max(target - draft / P, 0): the law of the next token at the places of the draft's support, up to a factor
    that leaves target itself everywhere else. target, draft [sessions, support] float64, running [sessions] > 0."""
    return (target - draft / running[:, None]).clamp(min=0).log()
