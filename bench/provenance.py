"""What a committed result needs to be believed, and where results go."""

import os
import sys
from typing import Any

from cluster.bench import provenance as shared

ROOT = shared.ROOT
RESULTS = ROOT / "bench" / "results"


def provenance() -> dict[str, Any]:
    command = " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    return {"command": command} | shared.provenance()
