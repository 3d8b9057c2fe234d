"""Where a benchmark's results go: checked before anything is measured, written after."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.protocol.errors import InvalidRequest

PICTURE_FORMATS = (".png", ".svg", ".pdf")


def check_outputs(json_file: Path | None, picture: Path | None) -> None:
    """Raises InvalidRequest for what could not be written at the end."""
    for path in (json_file, picture):
        if path is not None and not path.parent.is_dir():
            raise InvalidRequest(f"{path.parent} is no directory to write {path.name} to")
    if picture is None:
        return
    if picture.suffix.lower() not in PICTURE_FORMATS:
        raise InvalidRequest(f"{picture.name}: a picture's name ends in one of {', '.join(PICTURE_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidRequest("a picture needs matplotlib: pip install 'outrider[bench]'")


def write_outputs(
    report: dict[str, Any], json_file: Path | None, picture: Path | None, draw: Callable[[dict[str, Any], Path], None]
) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if picture is not None:
        draw(report, picture)
