"""What the tenants of a load ask: prompts, lengths and their shares. Read once from YAML, or built in.

Knows nothing of when a request is sent, nor of servers.
"""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.bench.load.prompts import MIXES, Prompt
from cluster.check.answer import Ask
from cluster.protocol.errors import InvalidRequest

Count = Annotated[int, Field(ge=1, le=100_000)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SpeculationFields(_Model):
    """Outrider's own request field; absent: as the server is configured."""

    enabled: bool | None = None
    max_depth: Annotated[int | None, Field(ge=0)] = None
    drafter: str | None = None


class Tenant(_Model):
    """One kind of client. Either `mix` or `prompts` says what it asks; a range is [smallest, largest]."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0  # its share of the arrivals, against the other tenants'
    mix: Literal["copy", "open", "chat"] | None = None
    words: tuple[Count, Count] = (40, 120)  # of a mix's prompts, about
    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = ()  # texts to continue
    max_tokens: tuple[Count, Count] = (16, 64)
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    ignore_eos: bool = False  # every answer has max_tokens
    speculation: SpeculationFields = SpeculationFields()

    @model_validator(mode="after")
    def _is_whole(self) -> "Tenant":
        if (self.mix is None) == (not self.prompts):
            raise ValueError("exactly one of mix and prompts is needed")
        for name, (low, high) in (("words", self.words), ("max_tokens", self.max_tokens)):
            if low > high:
                raise ValueError(f"{name}: {low} is more than {high}")
        return self

    def ask(self, chance: Random) -> Ask:
        """The next request of this tenant."""
        extra: dict[str, Any] = {"ignore_eos": True} if self.ignore_eos else {}
        if self.temperature > 0:
            extra["seed"] = chance.getrandbits(31)
        if said := self.speculation.model_dump(exclude_none=True):
            extra["speculation"] = said
        tokens = chance.randint(*self.max_tokens)
        return Ask(self._prompt(chance), tokens, self.temperature, extra, stream=True)

    def _prompt(self, chance: Random) -> Prompt:
        if self.mix is None:
            return chance.choice(self.prompts)
        return MIXES[self.mix](chance.randint(*self.words), chance)


class Workload(_Model):
    tenants: Annotated[tuple[Tenant, ...], Field(min_length=1, max_length=64)]

    @model_validator(mode="after")
    def _names_are_unique(self) -> "Workload":
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) != len(names):
            raise ValueError(f"tenant names must be unique, got {names}")
        return self


COPY = Tenant(name="copy", mix="copy", words=(30, 90), max_tokens=(32, 96))
# Sampled: a small model that continues greedily soon repeats itself, which drafts foresee.
OPEN = Tenant(name="open", mix="open", words=(10, 60), max_tokens=(32, 96), temperature=0.8)
CHAT = Tenant(name="chat", mix="chat", words=(40, 200), max_tokens=(16, 64), temperature=0.8)
BUILT_IN: Mapping[str, Workload] = {
    "mixed": Workload(tenants=(COPY, OPEN, CHAT)),
    "copy": Workload(tenants=(COPY,)),
    "open": Workload(tenants=(OPEN,)),
    "chat": Workload(tenants=(CHAT,)),
}


def load_workload(named: str) -> Workload:
    """A built-in workload by name, or the one in a YAML file. Raises InvalidRequest."""
    if named in BUILT_IN:
        return BUILT_IN[named]
    try:
        values = yaml.safe_load(Path(named).read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"workload {named!r} is none of {', '.join(BUILT_IN)} and no YAML file: {error}"
        ) from error
    return parse_workload(values)


def parse_workload(values: object) -> Workload:
    """Raises InvalidRequest that lists every wrong key with its path and the reason."""
    try:
        return Workload.model_validate(values)
    except ValidationError as error:
        lines = [".".join(map(str, e["loc"])) + ": " + e["msg"] for e in error.errors()]
        raise InvalidRequest("workload: " + "; ".join(lines), field=lines[0].split(":")[0]) from error
