"""What the documents show is true: commands exist, configurations parse."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
import yaml
from typer.core import TyperGroup
from typer.testing import CliRunner

from cluster.bench.load.workload import parse_workload
from cluster.cli import app
from cluster.config import Config, parse_config

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BENCH = ROOT / "docs" / "bench.md"  # its YAML is of workloads


def blocks(language: str, documents: Sequence[Path] = DOCUMENTS) -> list[str]:
    pattern = rf"```{language}\n(.*?)```"
    return [block for document in documents for block in re.findall(pattern, document.read_text(), re.DOTALL)]


def commands() -> list[list[str]]:
    """The words of every `outrider ...` line, without comments."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if re.match(r"(\S*/)?outrider ", line)]


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {name for block in blocks("sh") for name in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)}
    assert shown
    assert shown <= targets


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_outrider_commands_in_the_documents_can_be_called(words: list[str]) -> None:
    command = typer.main.get_command(app)
    words = list(words)
    while isinstance(command, TyperGroup):
        command = command.commands[words.pop(0)]
    command.make_context("outrider", words)  # parses and checks, and runs nothing


def test_outrider_commands_named_in_the_documents_exist() -> None:
    shown = {name for block in blocks("sh") for name in re.findall(r"outrider ([a-z]+)", block)}
    assert shown
    for name in shown:
        assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0, name


@pytest.mark.parametrize("text", blocks("yaml", [d for d in DOCUMENTS if d != BENCH]))
def test_configurations_in_the_documents_are_valid(text: str) -> None:
    assert parse_config(yaml.safe_load(text)) != Config()


@pytest.mark.parametrize("text", blocks("yaml", [BENCH]))
def test_workloads_in_the_documents_are_valid(text: str) -> None:
    assert parse_workload(yaml.safe_load(text)).tenants
