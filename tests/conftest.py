"""What must be set before torch is loaded: tests share few cores, and spinning threads starve each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
