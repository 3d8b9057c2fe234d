"""`outrider bench engine` over a tiny random model: both engines compute the same pass, and every figure adds up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from cluster.assembly import load_engine
from cluster.bench.engine.floor import Bandwidth, Traffic, traffic_of
from cluster.bench.engine.passes import Paged, Stock, random_tokens
from cluster.bench.engine.run import Plan, run_engine
from cluster.bench.engine.streams import Streams
from cluster.cli import app
from cluster.config import TargetConfig
from cluster.protocol.errors import InvalidRequest

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 640,
}
EMBEDDING = 97 * 48
PLAN = Plan(contexts=(5, 40), rows=(1, 3), streams=(1, 4), rounds=2, decode_steps=3)


def saved(path: Path, **shape: Any) -> Path:
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**(SHAPE | shape))).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tiny"))


def target(directory: Path, **engine: Any) -> TargetConfig:
    return TargetConfig.model_validate(
        {
            "model_loading_config": {"model_id": "tiny", "model_source": str(directory)},
            "engine_config": {"kv_cache_tokens": 2048, "threads": 1} | engine,
        }
    )


@pytest.mark.parametrize("tied", [False, True])
def test_the_floor_counts_what_a_pass_reads(tmp_path: Path, tied: bool) -> None:
    directory = saved(tmp_path, tie_word_embeddings=tied)
    found = traffic_of(directory, torch.float32)
    model = LlamaForCausalLM.from_pretrained(directory)
    everything = sum(parameter.numel() for parameter in model.parameters())  # a tied embedding once
    assert found.weight_bytes == 4 * (everything - (0 if tied else EMBEDDING))
    assert found.kv_bytes_per_token == 4 * 2 * 2 * 2 * 8  # keys and values, layers, heads, width
    assert traffic_of(directory, torch.bfloat16).weight_bytes * 2 == found.weight_bytes


def test_the_floor_is_bytes_over_bandwidth() -> None:
    assert Traffic(10**9, 10**6).floor_ms(1000, 4e9) == pytest.approx(500.0)
    bandwidth = Bandwidth("cpu", 1 << 20)
    bandwidth.measure()
    first = bandwidth.bytes_per_s
    bandwidth.measure()
    assert bandwidth.bytes_per_s >= first > 0  # the best counts


def test_both_engines_compute_the_same_pass_again_and_again(tiny: Path) -> None:
    tokens = random_tokens(97, 400)
    paged = Paged(load_engine(tiny, target(tiny)).runner, tokens, (5, 300), 16)
    stock = Stock(tiny, tokens, (5, 300), dtype=torch.float32, device="cpu")
    for context, rows in ((5, 1), (300, 16), (5, 8), (300, 1), (5, 8)):
        ours, theirs = paged.run(context, rows), stock.run(context, rows)
        assert ours.shape == (rows, 97)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        for passes in (paged, stock):
            passes.roll_back(context, rows)


def test_a_round_of_streams_gives_each_one_token_a_step_and_leaves_nothing_behind(tiny: Path) -> None:
    engine = load_engine(tiny, target(tiny))
    streams = Streams(engine, random_tokens(97, 64))
    before = engine.counters.verified_blocks
    timing = streams.measure(4, steps=5)
    assert engine.counters.verified_blocks - before == 4 * (5 + 1)  # the first one comes with the prefill
    assert 0 < timing.pass_seconds <= timing.seconds
    assert timing.steps == 5
    assert engine.load("x").sessions == 0


@pytest.mark.parametrize("pool", [64, 256])
def test_streams_that_have_no_room_are_told(tiny: Path, pool: int) -> None:
    engine = load_engine(tiny, target(tiny, kv_cache_tokens=pool))
    with pytest.raises(InvalidRequest, match="8 streams"):
        Streams(engine, random_tokens(97, 64)).measure(8, steps=2)


def test_a_report_has_every_cell_once_and_what_was_left_out(tiny: Path) -> None:
    plan = Plan(contexts=(5, 40, 639), rows=(1, 3), streams=(1, 4, 100), rounds=2, decode_steps=3)
    steps: list[tuple[str, int, int]] = []
    report = run_engine(tiny, target(tiny), plan, True, lambda *step: steps.append(step))
    assert [(cell["context"], cell["rows"]) for cell in report["cells"]] == [(5, 1), (5, 3), (40, 1), (40, 3), (639, 1)]
    assert report["left_out"] == [(639, 3)]
    assert [entry["streams"] for entry in report["streams"]] == [1, 4]  # max_sessions is 64
    assert report["largest_logit_difference"] < 1e-4
    for cell in report["cells"]:
        assert cell["overhead_share"] == pytest.approx(1 - cell["floor_ms"] / cell["ms"])
        assert cell["times_faster"] == pytest.approx(cell["baseline_ms"] / cell["ms"])
    assert report["peak_memory_bytes"] > report["weight_bytes"]
    assert all(0 <= entry["engine_share"] < 1 for entry in report["streams"])
    assert steps[-1] == ("passes", 3, 3)
    json.dumps(report)


def test_without_a_baseline_there_is_none(tiny: Path) -> None:
    report = run_engine(tiny, target(tiny), PLAN, False)
    assert report["largest_logit_difference"] is None
    assert all("baseline_ms" not in cell for cell in report["cells"])


@pytest.mark.parametrize(
    ("engine", "reason"), [({"tensor_parallel_size": 2}, "one piece"), ({"kv_cache_tokens": 256}, "kv_cache_tokens")]
)
def test_what_cannot_be_measured_is_refused_with_the_reason(tiny: Path, engine: dict[str, Any], reason: str) -> None:
    plan = Plan(contexts=(400,), rows=(1,), streams=(1,), rounds=1, decode_steps=1)
    with pytest.raises(InvalidRequest, match=reason):
        run_engine(tiny, target(tiny, **engine), plan, False)


def test_the_command_tells_writes_and_draws(tiny: Path, tmp_path: Path) -> None:
    config, out, picture = tmp_path / "config.yaml", tmp_path / "engine.json", tmp_path / "engine.png"
    config.write_text(yaml.safe_dump({"target": target(tiny).model_dump(mode="json")}))
    done = CliRunner().invoke(
        app, ["bench", "engine", str(config), "--quick", "--baseline", "--json", str(out), "--picture", str(picture)]
    )
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert report["provenance"]["machine"]["cores"]
    assert {(cell["context"], cell["rows"]) for cell in report["cells"]} == {
        (c, r) for c in (48, 512) for r in (1, 8, 32)
    }
    assert "transformers ms" in done.stdout
    assert "peak memory" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
