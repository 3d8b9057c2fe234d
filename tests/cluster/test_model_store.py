"""The model store: directories and the embedded default, with a conversion that is scripted instead of run."""

from pathlib import Path

import pytest

from cluster import model_store
from cluster.config import DEFAULT_MODEL
from cluster.protocol.errors import InvalidRequest, NotFound


class ScriptedConversion:
    """Writes a small "model" and counts how often it was asked to; can die half-way."""

    def __init__(self) -> None:
        self.runs = 0
        self.dies = False

    def __call__(self, gguf: Path, directory: Path) -> None:
        self.runs += 1
        (directory / "config.json").write_text("{}")
        if self.dies:
            raise OSError("disk full")
        (directory / "model.safetensors").write_bytes(b"weights" * 100)


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ScriptedConversion:
    monkeypatch.setattr(model_store, "_packaged_gguf", lambda: tmp_path / "model.gguf")
    return ScriptedConversion()


def test_the_second_start_uses_the_cache(conversion: ScriptedConversion, tmp_path: Path) -> None:
    first = model_store.embedded_model(tmp_path, conversion)
    assert model_store.embedded_model(tmp_path, conversion) == first
    assert conversion.runs == 1


def test_a_damaged_file_rebuilds_the_cache(conversion: ScriptedConversion, tmp_path: Path) -> None:
    directory = model_store.embedded_model(tmp_path, conversion)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    model_store.embedded_model(tmp_path, conversion)
    assert conversion.runs == 2
    assert weights.read_bytes() == b"weights" * 100


@pytest.mark.parametrize("lost", ["model.safetensors", "config.json", model_store.MANIFEST])
def test_a_missing_file_rebuilds_the_cache(conversion: ScriptedConversion, tmp_path: Path, lost: str) -> None:
    directory = model_store.embedded_model(tmp_path, conversion)
    (directory / lost).unlink()
    model_store.embedded_model(tmp_path, conversion)
    assert conversion.runs == 2
    assert (directory / lost).exists()


def test_a_conversion_that_dies_leaves_nothing_that_looks_complete(
    conversion: ScriptedConversion, tmp_path: Path
) -> None:
    conversion.dies = True
    with pytest.raises(OSError, match="disk full"):
        model_store.embedded_model(tmp_path, conversion)
    assert not any(p.is_dir() for p in tmp_path.iterdir())
    conversion.dies = False
    assert (model_store.embedded_model(tmp_path, conversion) / "model.safetensors").exists()


def test_a_gguf_file_with_another_checksum_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_store, "GGUF_SHA256", "0" * 64)
    with pytest.raises(InvalidRequest, match="SHA-256 expected 0000"):
        model_store.embedded_model(tmp_path, ScriptedConversion())


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        model_store.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert model_store.resolve(str(tmp_path)) == tmp_path


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such directory"):
        model_store.resolve(str(tmp_path / "absent"))


def test_the_default_name_is_the_embedded_model(conversion: ScriptedConversion, tmp_path: Path) -> None:
    expected = model_store.embedded_model(tmp_path, conversion)
    assert model_store.resolve(DEFAULT_MODEL, root=tmp_path) == expected
