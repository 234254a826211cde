"""Small cases for compute-sanitizer: python -m tests.cuda.gpu_check.sanitized_cases FOLDER NAME...

A name is that of a case of tests/cuda/kernel_cases.py or of a kernel in planted.cu.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np

from tests.cuda.gpu_check.device import CheckDevice, open_device
from tests.cuda.kernel_cases import CASES

PLANTED = Path(__file__).with_name("planted.cu")
NUM_WORDS = 64


def run(device: CheckDevice, name: str) -> None:
    if name in CASES:
        CASES[name](device)
        return
    kernel = device.load(PLANTED, ()).kernel(name)
    words = np.zeros(NUM_WORDS, np.uint32)
    out, unwritten = device.upload(words), device.allocate(words.nbytes)
    arguments = [ctypes.c_void_p(out), ctypes.c_void_p(unwritten), ctypes.c_int32(NUM_WORDS)]
    device.launch(kernel, (1, 1, 1), (NUM_WORDS, 1, 1), 0, arguments)
    device.copy_out(out, words)


if __name__ == "__main__":
    with open_device("cuda", Path(sys.argv[1])) as opened:
        for each in sys.argv[2:]:
            run(opened, each)
