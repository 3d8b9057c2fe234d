"""The one YAML file, read once at the edge. Unknown keys are refused with their path.

Field names follow Ray Serve LLM where they mean the same. Constructors elsewhere get the few values they use.
"""

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.protocol.errors import InvalidRequest

DEFAULT_MODEL = "smollm2-135m-instruct"  # the embedded default target (cluster/model_store.py)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelLoadingConfig(_Model):
    """Where a model comes from."""

    model_id: str = Field(DEFAULT_MODEL, description="The served model name")
    model_source: str = Field(
        DEFAULT_MODEL, description="A Hugging Face causal-LM directory, a hub id, or the embedded default"
    )


class AutoscalingConfig(_Model):
    """Replicas of a pool that follows its own load; names as in Ray Serve where they mean the same."""

    min_replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    initial_replicas: Annotated[int | None, Field(ge=1, le=1024)] = None  # default: min_replicas
    max_replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    # Share of a replica's room (sessions, KV cache, a drafter's time) that is in use when the pool has the right size.
    target_load: Annotated[float, Field(gt=0, le=1)] = 0.7
    upscale_delay_s: Annotated[float, Field(ge=0)] = 10.0
    downscale_delay_s: Annotated[float, Field(ge=0)] = 300.0

    @model_validator(mode="after")
    def _in_order(self) -> "AutoscalingConfig":
        if not self.min_replicas <= (self.initial_replicas or self.min_replicas) <= self.max_replicas:
            raise ValueError("expected min_replicas <= initial_replicas <= max_replicas")
        return self


class DeploymentConfig(_Model):
    """Passed to Ray Serve for one deployment."""

    num_replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    num_cpus: Annotated[float, Field(ge=0)] = 0.1
    num_gpus: Annotated[float, Field(ge=0)] = 0.0

    @property
    def most_replicas(self) -> int:
        return self.num_replicas


class PoolDeploymentConfig(DeploymentConfig):
    """Of verifiers and drafters, whose sessions live on the data plane."""

    autoscaling_config: AutoscalingConfig | None = None  # in place of num_replicas
    # A replica that is scaled down takes no new sessions and finishes those it has, for this long; the rest move.
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 120.0

    @property
    def most_replicas(self) -> int:
        return self.num_replicas if self.autoscaling_config is None else self.autoscaling_config.max_replicas


class PlacementConfig(_Model):
    """Which nodes a pool may use; absent = any node."""

    label_selector: dict[str, str] = Field(default_factory=dict)


class EngineConfig(_Model):
    """The verifier's engine."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    # invariant: a row's logits are the same bits whatever is in its pass, so no near-tie can fall another way.
    numerics: Literal["fast", "invariant"] = "fast"
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64, description="ranks the target is cut over")] = 1
    threads: Annotated[int, Field(ge=0, description="torch threads of one rank; 0 = its share of all cores")] = 0
    max_model_len: Annotated[int | None, Field(ge=2)] = None  # default: the model's own limit
    page_size: Annotated[int, Field(ge=1, le=1024)] = 16  # tokens per KV page
    kv_cache_tokens: Annotated[int, Field(ge=64)] = 65536  # pool size, all sessions together
    # A text that begins like an earlier one is not computed again while the earlier one's pages are still there.
    prefix_cache: bool = True
    max_sessions: Annotated[int, Field(ge=1)] = 64
    max_queued_sessions: Annotated[int, Field(ge=0)] = 64
    prefill_chunk_tokens: Annotated[int, Field(ge=1)] = 256  # rows of prefill per step
    max_depth: Annotated[int, Field(ge=0, le=64)] = 16


class TargetConfig(_Model):
    model_loading_config: ModelLoadingConfig = ModelLoadingConfig()
    engine_config: EngineConfig = EngineConfig()
    deployment_config: PoolDeploymentConfig = PoolDeploymentConfig()
    placement: PlacementConfig = PlacementConfig()


class DrafterConfig(_Model):
    """One drafter pool. Requests choose it by `name`; the first one is the default."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    kind: Literal["prompt_lookup", "draft_model", "features"]
    model_source: str = ""  # draft_model: a causal LM; features: a DSpark, DFlash or EAGLE-3 checkpoint for the target
    max_depth: Annotated[int, Field(ge=1, le=64)] = 8
    max_sessions: Annotated[int, Field(ge=1)] = 256
    kv_cache_tokens: Annotated[int, Field(ge=64)] = 32768  # of models; a full pool forgets the oldest session
    # What some checkpoints of kind features leave open; loading refuses those, and names the setting.
    slot_layout: Literal["anchor_first", "one_plus_n"] | None = None
    aux_layer_ids: Literal["inputs", "outputs"] | None = None
    threads: Annotated[int, Field(ge=0)] = 1
    deployment_config: PoolDeploymentConfig = PoolDeploymentConfig()
    placement: PlacementConfig = PlacementConfig()

    @model_validator(mode="after")
    def _model_source_where_needed(self) -> "DrafterConfig":
        if (self.kind != "prompt_lookup") != bool(self.model_source):
            raise ValueError("model_source is required for kinds draft_model and features, refused for prompt_lookup")
        if self.kind != "features" and (self.slot_layout or self.aux_layer_ids):
            raise ValueError("slot_layout and aux_layer_ids are of kind features only")
        return self


class DepthPolicyConfig(_Model):
    kind: Literal["adaptive", "fixed", "off"] = "fixed"
    depth: Annotated[int, Field(ge=0, le=64)] = 4  # fixed: of every block; adaptive: the most
    bypass: bool = True  # fixed: a session whose drafts do not pay skips the drafter for a while


class RouterConfig(_Model):
    depth_policy: DepthPolicyConfig = DepthPolicyConfig()
    max_draft_timeout_ms: Annotated[float, Field(gt=0, le=60_000)] = 2000.0
    max_sessions: Annotated[int, Field(ge=1)] = 1024
    reopen_timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0  # how long a session waits for another verifier
    deployment_config: DeploymentConfig = DeploymentConfig()
    placement: PlacementConfig = PlacementConfig()


class IngressConfig(_Model):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    grpc_port: Annotated[int | None, Field(ge=0, le=65535)] = 9000  # 0 = any free port, null = no gRPC
    strict: bool = False  # refuse unknown request fields with 400
    max_ongoing_requests: Annotated[int, Field(ge=1)] = 256
    deployment_config: DeploymentConfig = DeploymentConfig()
    placement: PlacementConfig = PlacementConfig()


class TransportConfig(_Model):
    # The address that data-plane servers bind and publish; "node": each the one by which Ray knows its node.
    host: str = "127.0.0.1"
    secret_file: Path | None = None  # shared data-plane secret; default: random per start


class Config(_Model):
    """The whole file. Every key has a default: an empty file serves the embedded model."""

    target: TargetConfig = TargetConfig()
    drafters: tuple[DrafterConfig, ...] = (DrafterConfig(name="lookup", kind="prompt_lookup"),)
    router: RouterConfig = RouterConfig()
    ingress: IngressConfig = IngressConfig()
    transport: TransportConfig = TransportConfig()

    @model_validator(mode="after")
    def _names_are_unique(self) -> "Config":
        names = [drafter.name for drafter in self.drafters]
        if len(set(names)) != len(names):
            raise ValueError(f"drafter names must be unique, got {names}")
        return self


def parse_config(values: object) -> Config:
    """Raises InvalidRequest that lists every wrong key with its path and the reason."""
    try:
        return Config.model_validate(values or {})
    except ValidationError as error:
        lines = [".".join(map(str, e["loc"])) + ": " + e["msg"] for e in error.errors()]
        raise InvalidRequest("configuration: " + "; ".join(lines), field=lines[0].split(":")[0]) from error


def load_config(path: Path | None) -> Config:
    """The configuration in `path`; the defaults when it is None."""
    if path is None:
        return Config()
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error
    return parse_config(values)
