"""What the target itself says, by transformers alone: its greedy text, and how near a tie any choice was."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from cluster.protocol.messages import SamplingParams
from outrider_kernels.accept import SamplingRows
from outrider_kernels.gumbel_race import RACE, race_noise
from outrider_kernels.target_distribution import target_distribution

NEAR_TIE = 1e-3  # float32: gap of the two best scores, noise included


@dataclass
class Reference:
    """Stock transformers, float32, with its own attention and its own cache."""

    model: torch.nn.Module
    near_ties: list[str] = field(default_factory=list)  # differences that were allowed, for the report

    @classmethod
    def load(cls, directory: Path) -> "Reference":
        return cls(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval())

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [int(token) for token in out[0, len(prompt) :]]

    @torch.inference_mode()
    def gap(self, tokens: Sequence[int], sampling: SamplingParams) -> float:
        """Between the two best scores for the token after `tokens`: logits when greedy, else log target + noise."""
        logits = self.model(torch.tensor([list(tokens)])).logits[:, -1].float()
        rows = SamplingRows.of([sampling], [len(tokens)])
        scores = logits
        if sampling.temperature > 0:
            position = torch.tensor([len(tokens)])
            noise = race_noise(logits.shape[-1], rows.key, position, rows.choice, RACE)
            scores = target_distribution(logits, rows.temperature, rows.top_k, rows.top_p) + noise
        best = scores[0].topk(2).values
        return float(best[0] - best[1])

    def assert_same(
        self, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int], sampling: SamplingParams, cell: str
    ) -> None:
        """Token for token, unless the first difference is a near-tie, which is recorded with its gap."""
        assert len(found) == len(expected), cell
        place = next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), None)
        if place is None:
            return
        gap = self.gap([*prompt, *expected[:place]], sampling)
        assert gap < NEAR_TIE, f"{cell}: token {place} is {found[place]}, expected {expected[place]}, gap {gap:.6f}"
        self.near_ties.append(f"{cell}: token {place}, gap {gap:.6f}")
