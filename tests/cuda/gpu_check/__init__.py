"""The GPU check: are the kernels right on this machine's GPU, and how fast. tests/cuda/README.md says how to run it."""
