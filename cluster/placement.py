"""Where replicas run and with how many threads: what must be in the environment before torch is loaded."""

# After a parallel region OpenMP's threads spin before they sleep. The default (some 10 ms) starves neighbours on the
# same cores; no spinning pays a wake-up for each of the several hundred regions of a pass. The value is a compromise
# seen in unrecorded trials on a shared machine; no benchmark of this repository confirms it yet.
OPENMP = {"GOMP_SPINCOUNT": "3000"}
