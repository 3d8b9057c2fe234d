"""Ranks as child processes of rank 0, for one machine without Ray. Knows nothing of what they compute."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from verifier_service.rank import RankOrder

_REAP_TIMEOUT_S = 5.0


class RankProcesses:
    """`pids` are those of ranks 1, 2, ..."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[str]] = []

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self.children]

    def start(self, orders: Sequence[RankOrder]) -> None:
        for order in orders:
            # Before torch is loaded there: one thread each, and no spinning beside the other ranks.
            env = os.environ | {"OMP_NUM_THREADS": str(order.threads)}
            child = subprocess.Popen(
                [sys.executable, "-m", "verifier_service.rank"],
                stdin=subprocess.PIPE,
                env=env,
                cwd=Path(__file__).parents[1],
                text=True,
            )
            self.children.append(child)
            assert child.stdin is not None
            with child.stdin:  # the order holds the target's token, which other users must not see among arguments
                child.stdin.write(order.to_json())

    def failed(self) -> str:
        ended = [child.pid for child in self.children if child.poll() is not None]
        return f"rank process {ended[0]} has ended" if ended else ""

    def kill(self) -> None:
        """At once; they hold nothing that is needed. May be called again, from any thread."""
        for child in self.children:
            child.kill()
        for child in self.children:
            child.wait(_REAP_TIMEOUT_S)
