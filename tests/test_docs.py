"""What the documents show is true: commands exist, configurations parse."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import Config, parse_config

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    pattern = rf"```{language}\n(.*?)```"
    return [block for document in DOCUMENTS for block in re.findall(pattern, document.read_text(), re.DOTALL)]


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {name for block in blocks("sh") for name in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)}
    assert shown
    assert shown <= targets


def test_outrider_commands_in_the_documents_exist() -> None:
    shown = {name for block in blocks("sh") for name in re.findall(r"outrider ([a-z]+)", block)}
    assert shown
    for name in shown:
        assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0, name


@pytest.mark.parametrize("text", blocks("yaml"))
def test_configurations_in_the_documents_are_valid(text: str) -> None:
    assert parse_config(yaml.safe_load(text)) != Config()
