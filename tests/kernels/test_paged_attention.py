from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider_kernels.page_table import PageTable
from outrider_kernels.paged_attention import paged_attention, plan_attention, write_kv
from outrider_kernels.ragged_batch import Piece, RaggedBatch, pack

CPU = torch.device("cpu")


class Cache:
    """Pages filled through the op itself, beside each session's plain keys and values."""

    def __init__(self, heads: int, kv_heads: int, dim: int, page_size: int, seed: int = 0, fill: float = 0.0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.table = PageTable(500, page_size)
        self.key_pages = torch.full((500, page_size, kv_heads, dim), fill)
        self.value_pages = torch.full_like(self.key_pages, fill)
        self.plain: dict[str, tuple[Tensor, Tensor]] = {}

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def run(self, sizes: dict[str, int], sliding: int | None = None) -> tuple[RaggedBatch, Tensor, Tensor]:
        """Appends random rows to each session; the batch, its queries and what the op makes of them."""
        for session, rows in sizes.items():
            length = self.table.length(session) if session in self.table else 0
            assert self.table.reserve(session, length + max(1, rows))
            empty = torch.empty(0, self.kv_heads, self.dim)
            self.plain.setdefault(session, (empty, empty))
        batch = pack(self.table, [Piece(s, np.zeros(rows, np.int64), 0) for s, rows in sizes.items()])
        rows = len(batch.slots)
        query = self.random(rows, self.heads, self.dim)
        key, value = self.random(rows, self.kv_heads, self.dim), self.random(rows, self.kv_heads, self.dim)
        for session, (start, stop) in zip(sizes, pairwise(batch.row_starts), strict=True):
            old = self.plain[session]
            self.plain[session] = (torch.cat([old[0], key[start:stop]]), torch.cat([old[1], value[start:stop]]))
        plan = plan_attention(
            batch.slots,
            batch.row_starts,
            batch.context_lens,
            batch.block_tables,
            self.table.page_size,
            self.heads // self.kv_heads,
            CPU,
            torch.float32,
            sliding=sliding,
        )
        write_kv(key, value, self.key_pages, self.value_pages, plan)
        return batch, query, paged_attention(query, self.key_pages, self.value_pages, plan, 0.3)

    def expected(self, sizes: dict[str, int], batch: RaggedBatch, query: Tensor, sliding: int | None = None) -> Tensor:
        """Softmax over each session's keys up to the row, every KV head repeated for its queries."""
        parts = []
        for session, (start, stop) in zip(sizes, pairwise(batch.row_starts), strict=True):
            key, value = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in self.plain[session])
            scores = torch.einsum("rhd,khd->hrk", query[start:stop], key) * 0.3
            rows = len(key) - (stop - start) + torch.arange(stop - start)
            hidden = torch.arange(len(key)) > rows[:, None]
            hidden |= torch.arange(len(key)) <= rows[:, None] - (len(key) if sliding is None else sliding)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            parts.append(torch.einsum("hrk,khd->rhd", weights, value))
        return torch.cat(parts)


SHAPES = [(1, 1, 1, 1), (3, 1, 5, 2), (9, 3, 64, 16), (4, 4, 7, 3), (8, 2, 33, 5)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_size"), SHAPES)
def test_ragged_passes_equal_plain_attention(heads: int, kv_heads: int, dim: int, page_size: int) -> None:
    cache = Cache(heads, kv_heads, dim, page_size)
    for sizes in [
        {"a": 1},
        {"a": 3, "b": 1},
        {"b": 40, "c": 5, "a": 1},
        {"c": 1, "a": 1, "b": 1},
        {"d": 260, "a": 17, "b": 2},
        {"a": 1, "b": 1, "c": 9, "d": 1, "e": 33},
        {"d": 2},
    ]:
        batch, query, out = cache.run(sizes)
        torch.testing.assert_close(out, cache.expected(sizes, batch, query), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sliding", [1, 3, 20, 400])
def test_a_sliding_window_shows_each_row_the_newest_rows_up_to_itself(sliding: int) -> None:
    cache = Cache(4, 2, 8, 5)
    for sizes in [{"a": 3, "b": 40}, {"a": 1, "b": 1, "c": 6}, {"a": 5, "b": 2}]:
        batch, query, out = cache.run(sizes, sliding)
        torch.testing.assert_close(out, cache.expected(sizes, batch, query, sliding), rtol=1e-5, atol=1e-5)


def test_sessions_without_rows_and_a_pass_without_sessions_are_nothing() -> None:
    cache = Cache(2, 1, 4, 3)
    _, _, out = cache.run({})
    assert out.shape == (0, 2, 4)
    cache.run({"a": 2, "b": 2})
    sizes = {"a": 0, "b": 3}
    batch, query, out = cache.run(sizes)
    torch.testing.assert_close(out, cache.expected(sizes, batch, query))


def test_nan_in_unused_slots_and_in_other_sessions_does_not_leak() -> None:
    cache = Cache(4, 2, 8, 4, fill=float("nan"))
    sizes = {"a": 1, "b": 6, "c": 3}
    batch, query, out = cache.run(sizes)
    torch.testing.assert_close(out, cache.expected(sizes, batch, query))
    cache.key_pages.flatten(0, 1)[cache.table.slots("b", 0, 6)] = float("nan")
    sizes = {"a": 2, "c": 5}
    batch, query, out = cache.run(sizes)
    torch.testing.assert_close(out, cache.expected(sizes, batch, query))
    _, _, out = cache.run({"a": 1, "b": 1, "c": 1})
    assert out.isfinite().all(dim=(1, 2)).tolist() == [True, False, True]


def test_rolled_back_rows_are_not_attended_to() -> None:
    cache = Cache(2, 2, 4, 4)
    cache.run({"a": 5})
    kept = cache.plain["a"]
    cache.run({"a": 4})
    cache.table.roll_back("a", 5)
    cache.plain["a"] = kept
    batch, query, out = cache.run({"a": 2})
    torch.testing.assert_close(out, cache.expected({"a": 2}, batch, query))


def test_pages_in_any_order_are_read_in_row_order() -> None:
    cache = Cache(2, 1, 4, 2)
    for name in "abcd":
        cache.run({name: 2})
    for name in "ca":
        cache.table.free(name)
    sizes = {"e": 7, "b": 3}
    batch, query, out = cache.run(sizes)
    assert not bool((np.diff(batch.block_tables[0]) == 1).all())
    torch.testing.assert_close(out, cache.expected(sizes, batch, query))
