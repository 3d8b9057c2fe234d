"""These tests run kernels in Triton's interpreter, which has to be asked for before Triton is imported: they run in the
process that tests/kernels/test_triton_twins.py starts, and are left out of any other."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
