"""Paged attention in Triton against torch, and a row's bits in any company.

Tolerance: 1e-5 in float32, where sums are taken in another order; in bfloat16 both round the weights of values, so 2^-7
of values of size 1.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider_kernels import paged_attention, paged_attention_triton
from outrider_kernels.page_table import PageTable
from outrider_kernels.ragged_batch import Piece, pack

CPU = torch.device("cpu")
SCALE = 0.3


@dataclass
class Pool:
    """Pages full of NaN, and sessions in them whose keys and values are their own random numbers."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int
    dtype: torch.dtype = torch.float32
    table: PageTable = field(init=False)
    pages: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.table = PageTable(300, self.page_size)
        shape = (300, self.page_size, self.kv_heads, self.dim)
        self.pages = [torch.full(shape, torch.nan, dtype=self.dtype) for _ in range(2)]

    def random(self, name: str, start: int, rows: int, heads: int, salt: int) -> Tensor:
        """What rows start .. start + rows - 1 of a session hold: a function of its name and their positions alone."""
        generator = torch.Generator().manual_seed(sum(map(ord, name)) * 10 + salt)
        return torch.randn(start + rows, heads, self.dim, generator=generator)[start:].to(self.dtype)

    def grow(self, name: str, rows: int) -> None:
        """A session's first rows, which nobody asks about."""
        assert self.table.reserve(name, rows)
        slots = torch.from_numpy(self.table.extend(name, rows))
        for salt, pages in enumerate(self.pages, start=1):
            pages.flatten(0, 1)[slots] = self.random(name, 0, rows, self.kv_heads, salt)

    def run(self, sizes: dict[str, int], **seen: object) -> tuple[Tensor, Tensor]:
        """Appends rows to each session; (what Triton says, what torch says) of their queries."""
        starts = {}
        for name, rows in sizes.items():
            starts[name] = self.table.length(name) if name in self.table else 0
            assert self.table.reserve(name, starts[name] + max(1, rows))
        batch = pack(self.table, [Piece(name, np.zeros(rows, np.int64), 0) for name, rows in sizes.items()])
        empty = torch.empty(0, 1, self.dim, dtype=self.dtype)
        query, key, value = (
            torch.cat([empty.expand(0, heads, -1)] + [self.random(n, starts[n], sizes[n], heads, salt) for n in sizes])
            for salt, heads in ((0, self.heads), (1, self.kv_heads), (2, self.kv_heads))
        )
        arrays = batch.slots, batch.row_starts, batch.context_lens, batch.block_tables
        shape = self.page_size, self.heads // self.kv_heads, CPU, self.dtype
        plans = [m.plan_attention(*arrays, *shape, **seen) for m in (paged_attention_triton, paged_attention)]
        paged_attention.write_kv(key, value, *self.pages, plans[0])
        ours = paged_attention_triton.paged_attention(query, *self.pages, plans[0], SCALE)
        return ours, paged_attention.paged_attention(query, *self.pages, plans[1], SCALE)


SHAPES = [(1, 1, 1, 1), (3, 1, 5, 2), (9, 3, 64, 16), (4, 4, 7, 3), (8, 2, 33, 5), (40, 1, 16, 8)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_size"), SHAPES)
def test_ragged_passes_say_what_torch_says(heads: int, kv_heads: int, dim: int, page_size: int) -> None:
    pool = Pool(heads, kv_heads, dim, page_size)
    pool.grow("d", 70)
    for sizes in [{"a": 1}, {"a": 3, "b": 1}, {"b": 17, "c": 5, "a": 1}, {"c": 1, "a": 0, "b": 2}, {"d": 1, "a": 3}]:
        ours, theirs = pool.run(sizes)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seen", [{"causal": False}, {"causal": False, "window": 5}, {"window": 1}, {"sliding": 1},
                                  {"sliding": 4}, {"sliding": 40}, {"sliding": 10**6}])  # fmt: skip
def test_rows_see_the_same_positions(monkeypatch: pytest.MonkeyPatch, seen: dict[str, object]) -> None:
    monkeypatch.setattr(paged_attention_triton, "SPLIT", 64)
    pool = Pool(4, 2, 8, 4)
    pool.grow("a", 90)
    for sizes in [{"b": 3, "c": 20}, {"c": 1, "b": 5, "a": 6}]:
        ours, theirs = pool.run(sizes, **seen)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_long_contexts_are_cut_and_combined() -> None:
    pool = Pool(2, 1, 8, 16)
    pool.grow("a", 1100)
    pool.grow("b", 511)
    ours, theirs = pool.run({"a": 5, "b": 1, "c": 2})
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("products_of_bfloat16")
def test_bfloat16_is_read_as_it_is_and_summed_in_float32() -> None:
    pool = Pool(6, 2, 64, 16, torch.bfloat16)
    pool.grow("a", 40)
    ours, theirs = pool.run({"a": 2, "b": 3})
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)


@pytest.mark.usefixtures("products_of_bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_depend_on_its_own_session_alone(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Alone or among others, in one pass or many, at any place of a tile, with little scratch or much."""
    monkeypatch.setattr(paged_attention_triton, "SPLIT", 32)
    rows = 49
    alone = Pool(6, 2, 16, 4, dtype)
    (whole, _), (newest, _) = alone.run({"a": rows}), alone.run({"a": 5})
    crowd = Pool(6, 2, 16, 4, dtype)
    found = []
    for step, mates in [(1, {"b": 3}), (30, {}), (7, {"c": 20, "d": 1}), (2, {"b": 1, "d": 9}), (9, {"e": 2})]:
        out, _ = crowd.run({**mates, "a": step})
        found.append(out[-step:])
    assert torch.equal(torch.cat(found), whole)
    monkeypatch.setattr(paged_attention_triton, "_SCRATCH_BYTES", 1)
    assert torch.equal(crowd.run({"f": 8, "a": 5, "b": 20})[0][8:13], newest)


def test_a_pass_without_rows_is_nothing() -> None:
    pool = Pool(2, 1, 4, 3)
    assert pool.run({})[0].shape == (0, 2, 4)
    assert pool.run({"a": 0})[0].shape == (0, 2, 4)
