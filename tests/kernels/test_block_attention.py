"""Attention of a block over its context: both ways inside the block, with or without a window before it."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider_kernels.page_table import PageTable
from outrider_kernels.paged_attention import paged_attention, plan_attention, write_kv
from outrider_kernels.ragged_batch import Piece, pack

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4


def attend_paged(contexts: list[int], blocks: list[int], *, causal: bool, window: int | None) -> list[Tensor]:
    """[block, heads, dim] of each session, and what plain attention with a dense mask gives, one after the other."""
    generator = torch.Generator().manual_seed(0)
    table = PageTable(64, PAGE)
    pages = [torch.full((64, PAGE, KV_HEADS, DIM), torch.nan) for _ in range(2)]
    held = []
    for session, (context, block) in enumerate(zip(contexts, blocks, strict=True)):
        assert table.reserve(session, context + block)
        keys, values = torch.randn(2, context + block, KV_HEADS, DIM, generator=generator)
        held.append((keys, values))
        slots = torch.from_numpy(table.extend(session, context))
        for pool, rows in zip(pages, (keys, values), strict=True):
            pool.flatten(0, 1)[slots] = rows[:context]
    batch = pack(table, [Piece(session, np.zeros(block), logits=0) for session, block in enumerate(blocks)])
    plan = plan_attention(
        batch.slots,
        batch.row_starts,
        batch.context_lens,
        batch.block_tables,
        PAGE,
        HEADS // KV_HEADS,
        torch.device("cpu"),
        torch.float32,
        causal=causal,
        window=window,
    )
    new = [
        torch.cat([rows[context:] for rows, context in zip(kind, contexts, strict=True)])
        for kind in zip(*held, strict=True)
    ]
    write_kv(*new, *pages, plan)
    queries = torch.randn(sum(blocks), HEADS, DIM, generator=generator)
    found = paged_attention(queries, *pages, plan, DIM**-0.5)
    expected = []
    for (keys, values), rows, context in zip(held, queries.split(blocks), contexts, strict=True):
        mask = visible(context, len(rows), causal, window)
        ours = [x.transpose(0, 1)[None] for x in (rows, keys, values)]
        expected.append(scaled_dot_product_attention(*ours, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    return [found, torch.cat(expected)]


def visible(context: int, block: int, causal: bool, window: int | None) -> Tensor:
    row, key = torch.arange(block)[:, None], torch.arange(context + block)
    last = context + row if causal else torch.full_like(row, context + block)
    return (key <= last) & (key >= context - (context if window is None else window))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(
    ("contexts", "blocks"),
    [([0], [1]), ([9], [5]), ([0, 3, 17, 40], [5, 5, 5, 5]), ([7, 1, 30], [1, 6, 3]), ([12, 3], [40, 2])],
)
def test_a_block_sees_what_plain_attention_sees(
    contexts: list[int], blocks: list[int], causal: bool, window: int | None
) -> None:
    found, expected = attend_paged(contexts, blocks, causal=causal, window=window)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
