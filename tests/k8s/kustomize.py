"""The part of kustomize that our overlays use, in a few lines; what it does not know, it refuses.

Where a kubectl is installed, test_kustomize.py holds it against the real one.
"""

import base64
import copy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

_KNOWN = {"apiVersion", "kind", "resources", "images", "patches", "secretGenerator", "generatorOptions"}


class Refused(ValueError):
    """The kustomization asks for what this renderer does not know, or cannot be satisfied."""


def render(directory: Path) -> list[Manifest]:
    """The manifests of a kustomization directory, generated ones last."""
    told = load(directory / "kustomization.yaml")
    _only(told, _KNOWN, directory)
    if told.get("generatorOptions", {"disableNameSuffixHash": True}) != {"disableNameSuffixHash": True}:
        raise Refused(f"{directory}: generatorOptions {told['generatorOptions']}")
    manifests = [m for resource in told.get("resources", []) for m in _resource(directory / resource)]
    manifests += [_secret(directory, one) for one in told.get("secretGenerator", [])]
    for patch in told.get("patches", []):
        _patch(manifests, directory, patch)
    for image in told.get("images", []):
        _only(image, {"name", "newName", "newTag"}, directory)
        for manifest in manifests:
            _tag(manifest, image)
    return manifests


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def only(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The one manifest of that kind and name."""
    found = [m for m in manifests if m["kind"] == kind and name in (None, m["metadata"]["name"])]
    if len(found) != 1:
        raise Refused(f"{len(found)} manifests of kind {kind}, name {name}")
    return found[0]


def _resource(path: Path) -> list[Manifest]:
    return render(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))


def _secret(directory: Path, told: Manifest) -> Manifest:
    _only(told, {"name", "files"}, directory)
    pairs = [one.split("=", 1) for one in told["files"]]
    data = {key: base64.b64encode((directory / file).read_bytes()).decode() for key, file in pairs}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": told["name"]}, "type": "Opaque", "data": data}


def _patch(manifests: list[Manifest], directory: Path, told: Manifest) -> None:
    _only(told, {"path", "target"}, directory)
    body = load(directory / told["path"])
    if isinstance(body, list):
        _only(told["target"], {"kind", "name"}, directory)
        target = only(manifests, told["target"]["kind"], told["target"]["name"])
        for operation in body:
            _operate(target, operation)
    elif "target" in told:
        raise Refused(f"{directory}: a merge patch says itself what it means, without a target")
    else:
        _merge(only(manifests, body["kind"], body["metadata"]["name"]), body)


def _merge(into: Manifest, patch: Manifest) -> None:
    for key, value in patch.items():
        if value is None or isinstance(value, list):
            raise Refused(f"merge patch: {key} is null or a list, which kinds without a schema merge in their own way")
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _operate(document: Any, operation: Manifest) -> None:
    """One operation of RFC 6902: test, add or replace."""
    op, path, value = operation["op"], operation["path"], copy.deepcopy(operation["value"])
    *way, last = [part.replace("~1", "/").replace("~0", "~") for part in path.removeprefix("/").split("/")]
    try:
        for part in way:
            document = document[int(part) if isinstance(document, list) else part]
        key = last if isinstance(document, dict) or last == "-" else int(last)
        if op == "add" and isinstance(document, list):
            document.insert(len(document) if key == "-" else key, value)
        elif op == "add":
            document[key] = value
        elif op in ("test", "replace"):
            found = document[key]
            if op == "replace":
                document[key] = value
            elif found != value:
                raise Refused(f"test failed: {path} is {found!r}, not {value!r}")
        else:
            raise Refused(f"operation {op!r}")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise error if isinstance(error, Refused) else Refused(f"no such path: {path}") from error


def _tag(node: Any, image: Manifest) -> None:
    """Kustomize looks into every list called containers, in any kind."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("containers", "initContainers") and isinstance(value, list):
                for container in value:
                    _tag_container(container, image)
            _tag(value, image)
    elif isinstance(node, list):
        for value in node:
            _tag(value, image)


def _tag_container(container: Manifest, image: Manifest) -> None:
    name, _, tag = container["image"].partition(":")
    if name == image["name"]:
        new_tag = image.get("newTag", tag)
        container["image"] = image.get("newName", name) + (f":{new_tag}" if new_tag else "")


def _only(told: Manifest, known: set[str], where: Path) -> None:
    if unknown := set(told) - known:
        raise Refused(f"{where}: unknown keys {sorted(unknown)}")
