"""Chairlift beside OpenVINO GenAI on the same requests, taking turns on the same machine; prints ratios.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install openvino-genai gguf
    python tests/peers/compare.py --model models/smollm2-135m-w8a8 --gguf models/SmolLM2-135M-Instruct.Q4_1.gguf \
        --peer-python /tmp/peer/bin/python --max-num-seqs 16

Every repetition starts both programs anew and counts generation only, not loading.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUMMARY = re.compile(r"(\d+) output tokens in ([\d.]+) s")


def chairlift_rate(options: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("chairlift")), "run", "--model", options.model]
        command += ["--requests", options.requests, "--output", f"{folder}/out.jsonl"]
        command += ["--max-num-seqs", str(options.max_num_seqs), *options.chairlift_arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    match = SUMMARY.search(done.stderr)
    if match is None:
        raise SystemExit(f"no summary in: {done.stderr}")
    return int(match[1]) / float(match[2])


def peer_rate(options: argparse.Namespace) -> float:
    command = [options.peer_python, str(HERE / "openvino_ragged.py"), "--gguf", options.gguf]
    command += ["--requests", options.requests, "--max-num-seqs", str(options.max_num_seqs)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    return float(result["output_tokens"] / result["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--requests", default=str(HERE.parent / "data" / "ragged.jsonl"))
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("chairlift_arguments", nargs="*", help="passed on to `chairlift run`, after --")
    options = parser.parse_args()
    ours, peers = [], []
    for _ in range(options.repeat):
        ours.append(chairlift_rate(options))
        peers.append(peer_rate(options))
        print(f"chairlift {ours[-1]:.1f}  openvino {peers[-1]:.1f}  ratio {ours[-1] / peers[-1]:.2f}", flush=True)
    ratio = statistics.median(a / b for a, b in zip(ours, peers, strict=True))
    print(f"max-num-seqs {options.max_num_seqs}: median ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
