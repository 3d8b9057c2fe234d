"""Arrivals are a Poisson process, repeatable, and ask what their tenants say."""

import itertools
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cluster.bench.load.arrivals import Arrival, poisson
from cluster.bench.load.prompts import MIXES, passage
from cluster.bench.load.workload import BUILT_IN, Workload, load_workload, parse_workload
from cluster.protocol.errors import InvalidRequest

MIXED = BUILT_IN["mixed"]


def drawn(workload: Workload = MIXED, rate: float = 50.0, duration_s: float = 20.0, seed: int = 1) -> list[Arrival]:
    return list(poisson(workload, rate, duration_s, seed))


def test_the_same_seed_is_the_same_load_and_another_one_is_not() -> None:
    assert drawn() == drawn()
    assert drawn() != drawn(seed=2)


def test_another_rate_asks_the_same_at_other_times() -> None:
    slow, fast = drawn(rate=10), drawn(rate=20)
    pairs = list(zip(slow, fast, strict=False))
    assert [(a.number, a.tenant, a.ask) for a, _ in pairs] == [(b.number, b.tenant, b.ask) for _, b in pairs]
    assert [a.at_s for a, _ in pairs] == pytest.approx([2 * b.at_s for _, b in pairs])


# Seeded, so it cannot fail by chance; for a fresh seed: number of arrivals beyond five standard deviations, 6e-7, and
# Kolmogorov-Smirnov's distance of the gaps from the exponential law beyond 1.95 / sqrt(n), 1e-3.
def test_gaps_are_exponential_with_the_rate() -> None:
    arrivals = drawn(rate=200.0, duration_s=20.0)
    assert abs(len(arrivals) - 4000) < 5 * math.sqrt(4000)
    times = [0.0, *(arrival.at_s for arrival in arrivals)]
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    n = len(gaps)
    distance = max(abs((i + 0.5) / n - (1 - math.exp(-200.0 * gap))) for i, gap in enumerate(gaps))
    assert distance < 1.95 / math.sqrt(n)


# Seeded; for a fresh seed beyond five standard deviations: 6e-7.
def test_tenants_share_the_arrivals_by_weight() -> None:
    tenants = [{"name": "a", "mix": "copy", "weight": 3}, {"name": "b", "mix": "open", "weight": 1}]
    arrivals = drawn(parse_workload({"tenants": tenants}), rate=100.0)
    share = sum(arrival.tenant == "a" for arrival in arrivals) / len(arrivals)
    assert abs(share - 0.75) < 5 * math.sqrt(0.75 * 0.25 / len(arrivals))


def test_a_tenant_asks_what_it_says() -> None:
    tenant = {
        "name": "own",
        "prompts": ["one", "two"],
        "max_tokens": [5, 7],
        "temperature": 0.5,
        "ignore_eos": True,
        "speculation": {"max_depth": 2},
    }
    asks = [arrival.ask for arrival in drawn(parse_workload({"tenants": [tenant]}))]
    assert {ask.prompt for ask in asks} == {"one", "two"}
    assert {ask.max_tokens for ask in asks} == {5, 6, 7}
    assert len({ask.extra["seed"] for ask in asks}) > len(asks) // 2
    assert all(ask.stream and ask.temperature == 0.5 for ask in asks)
    assert asks[0].extra["ignore_eos"] is True
    assert asks[0].extra["speculation"] == {"max_depth": 2}


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_prompts_have_the_length_asked_for_and_differ(mix: str) -> None:
    chance = Random(0)
    made = [MIXES[mix](50, chance) for _ in range(20)]
    texts = [p if isinstance(p, str) else "\n".join(m["content"] for m in p) for p in made]
    assert len(set(texts)) == 20
    assert all(50 <= len(text.split()) <= 110 for text in texts)


def test_a_passage_is_whole_sentences_of_at_least_the_words_asked_for() -> None:
    text = passage(30, Random(3))
    assert len(text.split()) >= 30
    assert text.endswith(".")
    assert len(" ".join(text.split(". ")[:-1]).split()) < 30


def test_a_workload_is_read_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "load.yaml"
    file.write_text("tenants:\n  - {name: editor, mix: copy, words: [10, 20]}\n")
    assert load_workload(str(file)).tenants[0].words == (10, 20)
    assert load_workload("copy") is BUILT_IN["copy"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (None, "workload"),
        ({"tenants": []}, "tenants"),
        ({"tenants": [{"name": "a"}]}, "exactly one of mix and prompts"),
        ({"tenants": [{"name": "a", "mix": "copy", "prompts": ["x"]}]}, "exactly one of mix and prompts"),
        ({"tenants": [{"name": "a", "mix": "song"}]}, "tenants.0.mix"),
        ({"tenants": [{"name": "a", "mix": "copy", "wieght": 2}]}, "tenants.0.wieght"),
        ({"tenants": [{"name": "a", "mix": "copy", "words": [9, 3]}]}, "9 is more than 3"),
        ({"tenants": [{"name": "a", "mix": "copy", "max_tokens": [0, 3]}]}, "max_tokens.0"),
        ({"tenants": [{"name": "a", "mix": "copy"}] * 2}, "unique"),
    ],
)
def test_a_wrong_workload_is_refused_with_the_reason(values: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        parse_workload(values)


def test_a_workload_that_is_no_name_and_no_file_is_refused_with_the_names() -> None:
    with pytest.raises(InvalidRequest, match="mixed, copy, open, chat"):
        load_workload("nothing-of-the-kind.yaml")
