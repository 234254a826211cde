"""The process of one step of the GPU check: python -m tests.cuda.gpu_check_process MODULE:FUNCTION DEVICE FILE."""

import sys
from pathlib import Path

from tests.cuda.gpu_check import run_step

if __name__ == "__main__":
    run_step(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
