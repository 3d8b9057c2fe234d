"""Where replicas run and with how many threads: what must be in the environment before torch is loaded."""

# After a parallel region OpenMP's threads spin before they sleep. The default (some 10 ms) starves neighbours on the
# same cores; no spinning pays a wake-up for each of the several hundred regions of a pass. One row of SmolLM2-135M on
# two AVX-512 cores, ms: 26 with the default, 29 with 3000, 42 with 0; beside a busy process 57 with 3000, 44 with 0.
OPENMP = {"GOMP_SPINCOUNT": "3000"}
