"""Where replicas run and with how many threads: what must be in the environment before torch is loaded."""

# After a parallel region OpenMP's threads spin this often before they sleep. The default (some 10 ms) starves
# neighbours on the same cores; no spinning pays a wake-up for each of the several hundred regions of a pass.
OPENMP = {"GOMP_SPINCOUNT": "30000"}
