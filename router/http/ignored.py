"""Tells the client which of its fields meant nothing. Names are the client's: only tame ones get into a header."""

import re
from collections.abc import Sequence

MAX_NAMES = 20


def ignored_header(unknown: Sequence[str]) -> dict[str, str]:
    """The response header that lists unknown fields; empty when there are none."""
    if not unknown:
        return {}
    names = [re.sub(r"[^A-Za-z0-9_.\-]", "?", name[:64]) for name in unknown[:MAX_NAMES]]
    if len(unknown) > MAX_NAMES:
        names.append(f"and-{len(unknown) - MAX_NAMES}-more")
    return {"x-outrider-ignored": ", ".join(names)}
