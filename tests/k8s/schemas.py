"""Manifests against the schemas of the core kinds (tests/data/kubernetes) and of CustomResourceDefinitions.

Keys that a schema does not name are refused, as an API server with strict field validation refuses them. Quantities
have a form. What a server fills in by default is not asked for.
"""

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator  # comes with ray

CORE = Path(__file__).parents[1] / "data" / "kubernetes" / "core-v1.37.json"
# resource.Quantity of k8s.io/apimachinery, as CustomResourceDefinitions spell it.
QUANTITY = (
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
)

Schema = dict[str, Any]


def complaints(manifest: object, schema: Schema) -> list[str]:
    """Every fault as "path: what is wrong"."""
    errors = Draft202012Validator(schema).iter_errors(manifest)
    return sorted(f"{error.json_path}: {error.message}" for error in errors)


def core(kind: str) -> Schema:
    """The schema of a core kind, by its short name."""
    return {"$ref": f"#/$defs/{kind}", "$defs": _core_definitions()}


def custom(path: Path) -> Schema:
    """The schema of the stored version of a CustomResourceDefinition."""
    definition = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = [v for v in definition["spec"]["versions"] if v["storage"]]
    schema: Schema = _closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"$ref": "#/$defs/ObjectMeta"}
    return schema | {"$defs": _core_definitions()}


@functools.cache
def _core_definitions() -> Schema:
    definitions = json.loads(CORE.read_text())["$defs"]
    definitions["Quantity"] = {"anyOf": [{"type": "string", "pattern": QUANTITY}, {"type": "number"}]}
    return {name: _closed(definition) for name, definition in definitions.items()}


def _closed(schema: Schema) -> Schema:
    """JSON Schema of an OpenAPI schema: no key beyond its properties, nothing required that has a default."""
    closed = copy.deepcopy(schema)
    for part in _parts(closed):
        properties = part.get("properties")
        if part.get("x-kubernetes-int-or-string"):
            part.pop("type", None)  # a pattern holds for strings alone
            part.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
        if properties is None:
            continue
        if not part.get("x-kubernetes-preserve-unknown-fields"):
            part.setdefault("additionalProperties", False)
        part["required"] = [key for key in part.get("required", []) if "default" not in properties.get(key, {})]
    return closed


def _parts(schema: Any) -> Iterator[Schema]:
    """Every schema inside a schema, itself first; names of properties are no schemas."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key in ("properties", "$defs"):
        for part in list(schema.get(key, {}).values()):
            yield from _parts(part)
    for key in ("items", "additionalProperties"):
        yield from _parts(schema.get(key))
