"""Time OpenVINO GenAI's continuous batching on a file of requests. Needs `pip install openvino-genai gguf`.

Prints one JSON line a repetition: {"output_tokens": ..., "seconds": ...}. Model loading is not counted. With
`--max-num-seqs 1` each request is added when the one before it has ended.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai


def add(pipeline: openvino_genai.ContinuousBatchingPipeline, index: int, request: dict) -> object:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = request["max_tokens"]
    config.ignore_eos = True
    prompt = np.array([request["prompt_token_ids"]], np.int64)
    return pipeline.add_request(index, openvino.Tensor(prompt), config)


def run(pipeline: openvino_genai.ContinuousBatchingPipeline, requests: list[dict], one_at_a_time: bool) -> list[object]:
    handles = []
    for index, request in enumerate(requests):
        handles.append(add(pipeline, index, request))
        while one_at_a_time and pipeline.has_non_finished_requests():
            pipeline.step()
    while pipeline.has_non_finished_requests():
        pipeline.step()
    return handles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=1)
    options = parser.parse_args()
    requests = [json.loads(line) for line in options.requests.read_text().splitlines()]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = options.max_num_seqs
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(options.gguf), scheduler, "CPU")
    for _ in range(options.repeat):
        start = time.perf_counter()
        handles = run(pipeline, requests, options.max_num_seqs == 1)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.generated_ids) for handle in handles for output in handle.read_all())
        print(json.dumps({"output_tokens": tokens, "seconds": round(seconds, 3)}), flush=True)


if __name__ == "__main__":
    main()
