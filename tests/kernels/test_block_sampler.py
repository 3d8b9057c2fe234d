"""The sequential choice of a block's tokens against its definition, slot by slot and session by session."""

import pytest
import torch

from cluster.protocol.messages import SamplingParams
from cluster.protocol.sparse_law import SCALE
from outrider_kernels.accept import SamplingRows, choose_tokens
from outrider_kernels.block_sampler import GatedHead, RnnHead, VanillaHead, sample_block

VOCAB, RANK, WIDTH, SLOTS = 23, 5, 4, 4


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(3)


def params(**kwargs) -> SamplingParams:
    return SamplingParams(max_tokens=9, **kwargs)


def vanilla(rng) -> VanillaHead:
    return VanillaHead(torch.randn(VOCAB, RANK, generator=rng), torch.randn(VOCAB, RANK, generator=rng))


def inputs(rng, sessions):
    base = torch.randn(sessions, SLOTS, VOCAB, generator=rng)
    return base, torch.randint(0, VOCAB, (sessions,), generator=rng), torch.randn(sessions, SLOTS, WIDTH, generator=rng)


def test_each_slot_adds_the_bias_of_the_token_before(rng):
    head = vanilla(rng)
    base, anchor, _ = inputs(rng, 3)
    drafted = sample_block(base, anchor, head, SamplingRows.of([params()] * 3, [4, 9, 2])).token_ids
    for session in range(3):
        previous = int(anchor[session])
        for slot in range(SLOTS):
            logits = base[session, slot] + head.out @ head.embed[previous]
            previous = int(logits.argmax())
            assert int(drafted[session, slot]) == previous


def test_the_gate_looks_at_the_slots_hidden_row(rng):
    plain = vanilla(rng)
    gate, bias = torch.randn(RANK, WIDTH + RANK, generator=rng), torch.randn(RANK, generator=rng)
    base, anchor, hidden = inputs(rng, 2)
    sampling = SamplingRows.of([params()] * 2, [4, 9])
    drafted = sample_block(base, anchor, GatedHead(plain.embed, plain.out, gate, bias), sampling, hidden).token_ids
    for session in range(2):
        previous = int(anchor[session])
        for slot in range(SLOTS):
            embedded = plain.embed[previous]
            opened = torch.sigmoid(gate @ torch.cat([hidden[session, slot], embedded]) + bias)
            previous = int((base[session, slot] + plain.out @ (opened * embedded)).argmax())
            assert int(drafted[session, slot]) == previous


def test_the_recurrent_head_speaks_from_its_old_state_and_forgets_between_blocks(rng):
    plain = vanilla(rng)
    joint, bias = torch.randn(3 * RANK, 2 * RANK + WIDTH, generator=rng), torch.randn(3 * RANK, generator=rng)
    head = RnnHead(plain.embed, plain.out, joint, bias)
    base, anchor, hidden = inputs(rng, 2)
    sampling = SamplingRows.of([params()] * 2, [4, 9])
    drafted = sample_block(base, anchor, head, sampling, hidden).token_ids
    for session in range(2):
        previous, state = int(anchor[session]), torch.zeros(RANK)
        for slot in range(SLOTS):
            parts = joint @ torch.cat([state, plain.embed[previous], hidden[session, slot]]) + bias
            gate, candidate, out = parts[:RANK], parts[RANK : 2 * RANK], parts[2 * RANK :]
            previous = int((base[session, slot] + plain.out @ out.tanh()).argmax())
            assert int(drafted[session, slot]) == previous
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
    assert torch.equal(sample_block(base, anchor, head, sampling, hidden).token_ids, drafted)


def test_a_raced_block_uses_the_noise_of_each_tokens_own_position(rng):
    head = vanilla(rng)
    base, anchor, _ = inputs(rng, 1)
    sampling = SamplingRows.of([params(temperature=1.2, top_k=9, key=77)], [30])
    drafted = sample_block(base, anchor, head, sampling).token_ids[0]
    previous = anchor
    for slot in range(SLOTS):
        previous = choose_tokens(base[:, slot] + head.embed[previous] @ head.out.T, sampling, torch.tensor([30 + slot]))
        assert int(drafted[slot]) == int(previous)


def test_a_drawn_block_is_biased_by_the_token_that_was_drawn_and_ships_its_laws(rng):
    head = vanilla(rng)
    sessions = 4000
    base, anchor, _ = inputs(rng, 1)
    keys = [params(temperature=1.0, rule="ratio", key=key * 7919) for key in range(sessions)]
    sampling = SamplingRows.of(keys, [5] * sessions)
    drafted = sample_block(base.expand(sessions, -1, -1), anchor.expand(sessions), head, sampling, size=6)
    assert [law.counts.shape for law in drafted.laws] == [(sessions, 6)] * SLOTS
    for slot, law in enumerate(drafted.laws):
        previous = anchor.expand(sessions) if slot == 0 else drafted.token_ids[:, slot - 1]
        assert bool((law.counts.sum(dim=-1) == SCALE).all())
        logits = base[0, slot] + head.embed[previous] @ head.out.T
        shares = logits.gather(-1, law.ids).double().softmax(dim=-1) * SCALE
        assert float((law.counts - shares).abs().max()) < 1.1  # 1 for rounding, the rest for float32 logits
        # How often each place was drawn, within 5.5 standard deviations: false alarm 1e-6 over all 24 places.
        place = (law.ids == drafted.token_ids[:, slot, None]).double()
        assert bool((place.sum(dim=-1) == 1).all())
        expected = (law.counts.double() / SCALE).sum(dim=0)
        variance = (law.counts.double() / SCALE * (1 - law.counts.double() / SCALE)).sum(dim=0)
        assert float(((place.sum(dim=0) - expected) / variance.sqrt()).abs().max()) < 5.5


def test_sessions_of_every_rule_sample_together_as_if_alone(rng):
    head = vanilla(rng)
    kinds = [
        params(),
        params(temperature=0.9, key=3),
        params(temperature=0.9, rule="ratio", key=4),
        params(rule="ratio", key=5),
        params(temperature=1.1, top_p=0.6, rule="ratio", key=6),
    ]
    base, anchor, _ = inputs(rng, len(kinds))
    together = sample_block(base, anchor, head, SamplingRows.of(kinds, [7] * len(kinds)), size=8)
    for i, kind in enumerate(kinds):
        alone = sample_block(base[i : i + 1], anchor[i : i + 1], head, SamplingRows.of([kind], [7]), size=8)
        assert alone.token_ids[0].tolist() == together.token_ids[i].tolist()
        drawn = kind.rule == "ratio" and kind.temperature > 0
        assert [bool(law.counts[i].any()) for law in together.laws] == [drawn] * SLOTS
