"""Two attention steps for a profiler: python -m tests.cuda.gpu_check.profiled_case FOLDER."""

import sys
from contextlib import closing
from pathlib import Path

from tests.cuda.gpu_check.attention_cases import HEADS, decode_case, prefill_cases
from tests.cuda.gpu_check.attention_step import AttentionStep
from tests.cuda.gpu_check.device import open_device

CASES = (decode_case(64, 2048, HEADS[0]), prefill_cases()[1])

if __name__ == "__main__":
    with open_device("cuda", Path(sys.argv[1])) as device:
        for case in CASES:
            with closing(AttentionStep(device, case, 1)) as step:
                step(0)
                device.wait()
