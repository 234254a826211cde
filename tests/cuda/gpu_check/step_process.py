"""The process of one step of the GPU check: python -m tests.cuda.gpu_check.step_process MODULE:FUNCTION DEVICE FILE."""

import faulthandler
import sys
from pathlib import Path

from tests.cuda.gpu_check.runner import run_step

if __name__ == "__main__":
    faulthandler.enable()
    run_step(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
