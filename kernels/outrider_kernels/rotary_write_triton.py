"""Rotation and page write in Triton: every value of a pass is read once and stored where attention looks for it.

Same contract as rotary_write.py; the first product is rounded to the pages' format before the second is added, as in
torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider_kernels.paged_attention import AttentionPlan
from outrider_kernels.rotary_write import Rotation

_HEADS = 8  # of one row in a program


@triton.jit
def rotary_write_kernel(
    qkv,
    cosines,
    sines,
    slots,
    queries,
    key_pages,
    value_pages,
    qkv_row,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Program (row, tile of heads) of qkv [rows, QUERY_HEADS + 2 KV_HEADS, WIDTH], whose rows are qkv_row apart."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tile * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    inside = d < WIDTH
    real = (head < QUERY_HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    source = qkv + row * qkv_row + head[:, None] * WIDTH
    x = tl.load(source + d[None, :], real, 0.0)
    partner = tl.load(source + ((d + WIDTH // 2) % WIDTH)[None, :], real, 0.0)
    cos = tl.load(cosines + row * WIDTH + d, inside, 0.0).to(tl.float32)
    sin = tl.load(sines + row * WIDTH + d, inside, 0.0).to(tl.float32)
    first = (x.to(tl.float32) * cos[None, :]).to(x.dtype).to(tl.float32)
    rotated = (first + partner.to(tl.float32) * sin[None, :]).to(x.dtype)
    key_head, value_head = head - QUERY_HEADS, head - QUERY_HEADS - KV_HEADS
    page_row = tl.load(slots + row) * (KV_HEADS * WIDTH)
    to_query = queries + (row * QUERY_HEADS + head)[:, None] * WIDTH + d[None, :]
    tl.store(to_query, rotated, real & (key_head < 0)[:, None])
    to_key = key_pages + page_row + key_head[:, None] * WIDTH + d[None, :]
    tl.store(to_key, rotated, real & ((key_head >= 0) & (value_head < 0))[:, None])
    to_value = value_pages + page_row + value_head[:, None] * WIDTH + d[None, :]
    tl.store(to_value, x, real & (value_head >= 0)[:, None])


def rotate_and_write(
    qkv: Tensor, rotation: Rotation, key_pages: Tensor, value_pages: Tensor, plan: AttentionPlan
) -> Tensor:
    """As rotary_write.rotate_and_write."""
    assert key_pages.is_contiguous()
    assert value_pages.is_contiguous()
    assert qkv.stride()[1:] == (qkv.shape[2], 1)
    rows, heads, width = qkv.shape
    kv_heads = key_pages.shape[2]
    queries = torch.empty(rows, heads - 2 * kv_heads, width, dtype=qkv.dtype, device=qkv.device)
    if rows:
        rotary_write_kernel[(rows, triton.cdiv(heads, _HEADS))](
            qkv,
            rotation.cos.contiguous(),
            rotation.sin.contiguous(),
            plan.slots,
            queries,
            key_pages,
            value_pages,
            qkv.stride(0),
            QUERY_HEADS=heads - 2 * kv_heads,
            KV_HEADS=kv_heads,
            WIDTH=width,
            HEADS=_HEADS,
            DIM=triton.next_power_of_2(width),
        )
    return queries
