"""The recorded drafters of tests/data/golden behind the real path: replicas of every pool in one process.

The target's directory has no tokenizer, which replicas hash: one is made up for it.
"""

import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from cluster.assembly import PoolReplica
from cluster.config import Config, parse_config
from cluster.local import LocalSystem
from cluster.protocol.faults import Fault, Faults, Hop
from cluster.protocol.local import LocalTransport
from cluster.protocol.messages import Committed, DraftBlock, Message, SamplingParams, Speculation, as_tokens
from drafter_service.feature_intake import FeatureIntake
from drafter_service.service import DrafterService
from verifier_service.engine import Engine
from verifier_service.service import VerifierService

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
NAMES = ["dspark_markov", "dspark_gated", "dspark_rnn", "dflash", "dflash_zlab", "eagle3", "eagle3_d2t"]
PROMPTS: list[list[int]] = json.loads((GOLDEN / "target" / "reference.json").read_text())["prompts"]
MAX_NEW = 24


def target_with_tokenizer(out: Path) -> Path:
    """A copy of the tiny target that can be served."""
    shutil.copytree(GOLDEN / "target", out)
    Tokenizer(WordLevel({f"<{i}>": i for i in range(256)}, unk_token="<0>")).save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return out


@cache
def runs(name: str) -> dict[str, Any]:
    """The recorded runs that follow from the arrays: not those whose random draws cannot be had again."""
    found: dict[str, Any] = json.loads((GOLDEN / name / "reference.json").read_text())
    return {run: body for run, body in found.items() if run.startswith(("greedy", "stop"))}


def drafted(round_: dict[str, Any]) -> list[int]:
    tokens: list[int] = round_.get("draft_tokens_all") or round_["draft_tokens"]
    return tokens


def depth(name: str) -> int:
    """That of the recorded rounds."""
    return max(len(drafted(one)) for run in runs(name).values() for one in run["rounds"])


def greedy_text(prompt: int) -> list[int]:
    """The target's own, as recorded."""
    tokens: list[int] = load_file(GOLDEN / "target" / "reference.safetensors")[f"p{prompt}.greedy_32"].tolist()
    return tokens


def drafter(name: str, **settings: Any) -> dict[str, Any]:
    entry = {"name": name, "kind": "features", "model_source": str(GOLDEN / name / "draft")}
    known = {"aux_layer_ids": "inputs"} if name == "eagle3_d2t" else {}
    return entry | {"name": name.replace("_", "-"), "max_depth": 16, "kv_cache_tokens": 2048} | known | settings


def config(target: Path, drafters: Sequence[dict[str, Any]], depth: int, **pool: Any) -> Config:
    """`pool`: more of the target's section."""
    return parse_config(
        {
            "target": {
                "model_loading_config": {"model_id": "golden", "model_source": str(target)},
                "engine_config": {"kv_cache_tokens": 8192, "threads": 1, "prefill_chunk_tokens": 8},
            }
            | pool,
            "drafters": list(drafters),
            "router": {"depth_policy": {"kind": "fixed", "depth": depth, "bypass": False}},
        }
    )


@dataclass
class Traffic:
    """Sees every message of a LocalTransport, and does to it what `fate` says. Blocks by (session, base_len)."""

    fate: Callable[[Hop, Message], Fault] = lambda hop, message: Fault()
    blocks: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def transport(self) -> LocalTransport:
        return LocalTransport(Faults(self._see))

    def _see(self, hop: Hop, message: Message) -> Fault:
        if isinstance(message, DraftBlock) and len(message.token_ids):
            self.blocks[(message.session_id, message.base_len)] = message.token_ids.tolist()
        return self.fate(hop, message)

    def of(self, session_id: str) -> dict[int, list[int]]:
        return {base_len: tokens for (sid, base_len), tokens in self.blocks.items() if sid == session_id}


def engine(system: LocalSystem, place: int = 0) -> Engine:
    service = system.verifiers[place].service
    assert isinstance(service, VerifierService)
    return service._thread._engine


def drafter_of(replica: PoolReplica) -> DrafterService:
    assert isinstance(replica.service, DrafterService)
    return replica.service


def intake(system: LocalSystem, place: int = 0) -> FeatureIntake:
    return cast(FeatureIntake, drafter_of(system.drafters[place]).intake)


async def generate(
    system: LocalSystem,
    session_id: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    speculation: Speculation | None = None,
    on_burst: Callable[[int], Awaitable[None]] | None = None,
) -> list[Committed]:
    """One generation's bursts; `on_burst(number)` is awaited at each."""
    bursts: list[Committed] = []
    async for burst in system.client.generate(session_id, as_tokens(prompt), sampling, speculation or Speculation()):
        bursts.append(burst)
        if on_burst is not None:
            await on_burst(len(bursts))
    return bursts


def text(bursts: Sequence[Committed]) -> list[int]:
    return [token for burst in bursts for token in burst.token_ids.tolist()]


def depths(bursts: Sequence[Committed]) -> list[int]:
    """Draft tokens of each round, without those at the end that max_tokens made short."""
    return [burst.stats.drafted for burst in bursts if burst.stats is not None]
