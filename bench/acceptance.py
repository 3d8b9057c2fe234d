"""What sampling and acceptance cost beside the target pass they follow, and what block verification gains.

    python bench/acceptance.py [--threads 2] [--repeats 3]

Share: SmolLM2-135M on this CPU verifies blocks of 4 drafts for 1, 8 and 32 sessions. The drafts are the best case for
speed and the worst for this share: all or nearly all are accepted, so that every row is judged. Gain: the same drafts
judged by block verification and by the token rule, for drafters that are the target with noise on its logits. Writes
bench/results/acceptance.json.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch: its threads would spin while others compute

import numpy as np
import torch
from torch import Tensor

from bench.provenance import RESULTS, provenance
from cluster.model_store import resolve
from cluster.protocol.messages import SamplingParams
from outrider_kernels.accept import SamplingRows, accept_blocks, choose_tokens, filtered_law
from outrider_kernels.accept_sparse import accept_sparse
from outrider_kernels.draft_choice import choose_drafts
from outrider_kernels.page_table import PageTable
from outrider_kernels.paged_lm import PagedLM
from outrider_kernels.ragged_batch import Piece, pack
from outrider_kernels.sparse_draft import DraftSupports, SparseRows
from router.http.text_codec import TextCodec

MODEL = "smollm2-135m-instruct"
TEXT = (
    "The lighthouse stood at the end of a long stone pier, and on clear mornings one could see three islands from its"
    " gallery. Nobody in the village remembered who had built it. The keeper, an old sailor with a beard, said that"
    " the first lamp had burned whale oil, that the second had burned paraffin, and that the third, which was electric,"
    " had never once failed him. In winter the waves came over the wall and froze on the railing, and he had to cut the"
    " ice with an axe before he could open the door."
)
DEPTH = 4
CONTEXT = 48  # tokens before each block
SAMPLING = {
    "greedy": SamplingParams(9),
    "coupled, top_k 50 top_p 0.9": SamplingParams(9, temperature=0.8, top_k=50, top_p=0.9),
    "coupled, full vocabulary": SamplingParams(9, temperature=0.8),
    "ratio, top_k 50 top_p 0.9": SamplingParams(9, temperature=0.8, top_k=50, top_p=0.9, rule="ratio"),
    "ratio, full vocabulary": SamplingParams(9, temperature=0.8, rule="ratio"),
}


class Target:
    """Many sessions over the real model; each keeps a context of CONTEXT - 1 rows."""

    def __init__(self, sessions: int) -> None:
        directory = resolve(MODEL)
        ids = TextCodec.from_directory(directory).encode(TEXT)
        self.model = PagedLM(directory, num_pages=sessions * 6 + 8)
        self.contexts = [[ids[(3 * s + i) % len(ids)] for i in range(CONTEXT)] for s in range(sessions)]

        self.table = PageTable(self.model.num_pages, self.model.page_size)
        for s in range(sessions):
            assert self.table.reserve(s, CONTEXT + 16)
        self.model.run(
            pack(self.table, [Piece(s, np.array(ids[:-1]), int(s == 0)) for s, ids in enumerate(self.contexts)])
        )

    def logits(self, rows: list[list[int]]) -> Tensor:
        """[all rows, vocab] of one pass over the first len(rows) sessions; the rows stay until they are rolled back."""
        return self.model.run(pack(self.table, [Piece(s, np.array(ids), len(ids)) for s, ids in enumerate(rows)]))

    def roll_back(self, sessions: int) -> None:
        for s in range(sessions):
            self.table.roll_back(s, CONTEXT - 1)

    def drafts(self, sampling: SamplingRows, depth: int, noise: float) -> tuple[Tensor, list[Any]]:
        """Blocks [S, depth] that the target itself drafts, its logits disturbed; rolled back afterwards."""
        sessions = len(sampling.key)
        rng = torch.Generator().manual_seed(1)
        last = [self.contexts[s][-1:] for s in range(sessions)]
        tokens, laws = [], []
        for index in range(depth):
            logits = self.logits(last)
            if noise:
                logits = logits + noise * torch.randn(logits.shape, generator=rng)
            chosen, law = choose_drafts(logits, sampling, index)
            tokens.append(chosen)
            laws.append(law)
            last = [[token] for token in chosen.tolist()]
        self.roll_back(sessions)
        return torch.stack(tokens, dim=1), laws


def median_ms(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start_s))
    return statistics.median(times)


def supports_of(laws: list[SparseRows], sessions: int) -> DraftSupports | None:
    if laws[0].counts.shape[-1] == 0:
        return None
    ids, counts = (torch.stack([getattr(law, name) for law in laws], dim=1) for name in ("ids", "counts"))
    ids, counts = (torch.nn.functional.pad(part, (0, 0, 0, 1)).flatten(0, 1) for part in (ids, counts))
    filled = counts > 0
    starts = torch.nn.functional.pad(filled.sum(dim=-1).cumsum(0), (1, 0))
    return DraftSupports(starts, ids[filled], counts[filled])


def share(target: Target, sessions: int, repeats: int) -> dict[str, Any]:
    """ms of a verification pass and of judging it, per kind of sampling."""
    found: dict[str, Any] = {}
    pass_ms: list[float] = []
    for name, params in SAMPLING.items():
        rows = SamplingRows.of(
            [SamplingParams(9, params.temperature, params.top_k, params.top_p, rule=params.rule, key=s)
             for s in range(sessions)],
            [CONTEXT] * sessions,
        )  # fmt: skip
        tokens, laws = target.drafts(rows, DEPTH, noise=0.0)
        blocks = [[target.contexts[s][-1], *tokens[s].tolist()] for s in range(sessions)]

        def one_pass(blocks: list[list[int]] = blocks) -> Tensor:
            logits = target.logits(blocks)
            target.roll_back(sessions)
            return logits

        start_s = time.perf_counter()
        logits = one_pass()
        pass_ms.append(1e3 * (time.perf_counter() - start_s))
        starts = torch.arange(sessions + 1) * (DEPTH + 1)
        drafts = torch.nn.functional.pad(tokens, (0, 1), value=-1).flatten()
        supports = supports_of(laws, sessions)

        def judge(logits=logits, starts=starts, drafts=drafts, rows=rows, supports=supports) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
            return accept_blocks(logits, starts, drafts, rows, supports)

        accepted, _ = judge()
        found[name] = {
            "judge_ms": round(median_ms(judge, repeats), 3),
            "accepted_of_4": round(float(accepted.double().mean()), 2),
        }
    typical_ms = statistics.median(pass_ms)
    for cell in found.values():
        cell["share_of_pass"] = round(cell["judge_ms"] / typical_ms, 4)
    return {"sessions": sessions, "rows": sessions * (DEPTH + 1), "pass_ms": round(typical_ms, 1), "kinds": found}


def drafting(target: Target, sessions: int, repeats: int) -> dict[str, float]:
    """ms that a drafter needs to choose one token of each session, apart from its own pass."""
    logits = target.logits([target.contexts[s][-1:] for s in range(sessions)])
    target.roll_back(sessions)
    coupled = SamplingRows.of([SamplingParams(9, temperature=0.8, key=s) for s in range(sessions)], [9] * sessions)
    drawn = SamplingRows.of(
        [SamplingParams(9, temperature=0.8, rule="ratio", key=s) for s in range(sessions)], [9] * sessions
    )
    return {
        "sessions": sessions,
        "race_ms": round(median_ms(lambda: choose_tokens(logits, coupled, coupled.base_len), repeats), 3),
        "quantise_and_draw_ms": round(median_ms(lambda: choose_drafts(logits, drawn, 0), repeats), 3),
    }


def gain(target: Target, noise: float, depths: tuple[int, ...], keys: int) -> list[dict[str, Any]]:
    """Mean accepted length of the same drafts under both rules; the bonus token not counted. Shorter blocks are
    prefixes of the longest."""
    sessions, longest = len(target.contexts), max(depths)
    rows = SamplingRows.of(
        [SamplingParams(9, temperature=1.0, rule="ratio", key=s) for s in range(sessions)], [CONTEXT] * sessions
    )
    tokens, laws = target.drafts(rows, longest, noise)
    blocks = [[target.contexts[s][-1], *tokens[s].tolist()] for s in range(sessions)]
    logits = target.logits(blocks).view(sessions, longest + 1, -1)
    target.roll_back(sessions)
    return [_gain(logits[:, : depth + 1], tokens[:, :depth], laws[:depth], rows, keys, noise) for depth in depths]


def _gain(
    logits: Tensor, tokens: Tensor, laws: list[SparseRows], rows: SamplingRows, keys: int, noise: float
) -> dict[str, Any]:
    sessions, depth = tokens.shape
    supports = supports_of(laws, sessions)
    assert supports is not None
    law = filtered_law(logits.flatten(0, 1), rows.take(torch.arange(sessions).repeat_interleave(depth + 1)))
    padded = supports.padded(torch.arange(len(law)))
    drafts = torch.nn.functional.pad(tokens, (0, 1), value=-1).flatten()
    starts = torch.arange(sessions + 1) * (depth + 1)
    mean = {"token": 0.0, "block": 0.0}
    for rule in mean:
        for key in range(keys):
            judging = rows.key + 1_000_003 * (key + 1)  # the drafts stay; only what judges them is drawn again
            accepted, _ = accept_sparse(law, starts, drafts, padded, rows.base_len, judging, rows.choice, rule)  # type: ignore[arg-type]
            mean[rule] += float(accepted.double().mean()) / keys
    return {
        "noise": noise,
        "depth": depth,
        "blocks": sessions,
        "judged_each": keys,
        "accepted_token_rule": round(mean["token"], 3),
        "accepted_block_verification": round(mean["block"], 3),
        "gain": round(mean["block"] / mean["token"] - 1, 4),
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"provenance": provenance(), "threads": options.threads, "depth": DEPTH}
    target = Target(32)
    result["share"] = [share(target, sessions, options.repeats) for sessions in (1, 8, 32)]
    result["drafting"] = [drafting(target, sessions, options.repeats) for sessions in (1, 8, 32)]
    result["block_verification"] = [cell for noise in (0.5, 1.0, 1.5) for cell in gain(target, noise, (4, 8), keys=8)]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "acceptance.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "provenance"}, indent=1))


if __name__ == "__main__":
    main()
