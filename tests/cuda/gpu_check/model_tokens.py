"""A tiny model's tokens: the CUDA executor's, in graphs and without, beside the CPU executor's."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from graphs.export import export_model
from service.core.types import Request, SamplingParams
from service.executor.config import ExecutorConfig
from service.executor.factory import create_executor
from tests.cuda.conftest import CONFIG, MODEL
from tests.cuda.gpu_check.device import CheckDevice, StepFailedError
from tests.cuda.gpu_check.executors import OpenExecutor, cuda_executor
from tests.cuda.gpu_check.report import Row
from tests.cuda.test_executor import requests
from tests.stepping import Outcome, run_requests
from tests.unit.tiny_export import write_tokenizer_json
from tests.unit.tiny_models import hf_tensors, write_hf

NEAR_TIE = 0.05  # of log-probabilities: activations are float16 here and float32 on the CPU
# Weights, KV, and how near likeliest tokens may be where texts part: by how far their log-probabilities are off.
FORMATS = (
    ("bfloat16", "fp8", 0.4),
    ("bfloat16", "auto", 0.2),
    ("float16", "fp8", 0.2),
    ("int8", "auto", 0.1),
    ("int4", "auto", 0.1),
)
LENGTHS = {"sim": (70, 1, 33), "cuda": (1, 17, 130, 70, 9, 45)}
NUM_TOKENS = {"sim": 3, "cuda": 24}


@dataclass(frozen=True)
class Comparison:
    num_tokens: int
    num_equal: int  # up to each text's first difference
    is_explained: bool  # every first difference is at a near tie


def model_tokens(device: CheckDevice) -> Iterator[Row]:
    """Graphs of every number of rows must yield what eager steps yield; padded and CPU ones, up to near ties."""
    config = replace(CONFIG, model_dir=_exported(device.folder / "tiny", "float16"))
    asked, plain = _asked(device.name)
    exact = _on_cpu(config, asked)
    faults = []
    with cuda_executor(device, replace(config, capture="off")) as opened:
        eager = run_requests(opened.executor, asked)
        yield _row("eager", opened, found := compare(exact, eager))
        faults += [] if found.is_explained else ["eager steps differ from the CPU executor"]
        faults += _differences("without log-probabilities", eager, run_requests(opened.executor, plain))
    every = tuple(range(1, config.max_num_seqs + 1))
    kinds = (("a graph for every size", every, True), ("two graphs, padded", (2, every[-1]), False))
    for name, buckets, is_exact in kinds:
        with cuda_executor(device, replace(config, capture="eager", capture_buckets=buckets)) as opened:
            # The second time over, the same graphs replay on other blocks.
            for turn in ("", ", again"):
                outcome = run_requests(opened.executor, plain)
                yield _row(name + turn, opened, found := compare(exact, outcome))
                if is_exact:
                    faults += _differences(name + turn, eager, outcome)
                elif not found.is_explained:
                    faults.append(f"{name}{turn}: other tokens than the CPU executor's")
            faults += _not_captured(name, opened, buckets)
    if faults:
        raise StepFailedError("; ".join(faults))


def model_formats(device: CheckDevice) -> Iterator[Row]:
    """Other weights and KV: every bucket captured, tokens those of the CPU executor up to near ties."""
    faults = []
    asked, plain = _asked(device.name)
    for weights, kv_dtype, near_tie in FORMATS[: 1 if device.name == "sim" else None]:
        name = f"{weights} weights, {kv_dtype} KV"
        config = replace(CONFIG, model_dir=_exported(device.folder / "tiny", weights))
        exact = _on_cpu(config, asked)
        buckets = (2, config.max_num_seqs)
        with cuda_executor(device, replace(config, kv_dtype=kv_dtype, capture_buckets=buckets)) as opened:
            found = compare(exact, run_requests(opened.executor, plain), near_tie)
            yield _row(name, opened, found)
            faults += [] if found.is_explained else [f"{name}: other tokens than the CPU executor's"]
            faults += _not_captured(name, opened, buckets)
    if faults:
        raise StepFailedError("; ".join(faults))


def _exported(folder: Path, weights: str) -> Path:
    write_hf(folder / "source", MODEL, hf_tensors(MODEL))
    write_tokenizer_json(folder / "source")
    return export_model(folder / "source", folder / weights, weights, overwrite=True).folder


def _asked(device_name: str) -> tuple[list[Request], list[Request]]:
    """Greedy requests with log-probabilities, and the same without."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS[device_name], temperature=0.0, ignore_eos=True, num_logprobs=2)
    asked = requests(sampling, LENGTHS[device_name])
    return asked, [replace(each, sampling=replace(each.sampling, num_logprobs=-1)) for each in asked]


def _on_cpu(config: ExecutorConfig, asked: list[Request]) -> Outcome:
    with closing(create_executor(config)) as executor:
        return run_requests(executor, asked)


def _not_captured(name: str, opened: OpenExecutor, buckets: tuple[int, ...]) -> list[str]:
    faults = [f"{name}: bucket {each}" for each in opened.failed]
    if sorted(opened.captured) != sorted(buckets):
        faults.append(f"{name}: of buckets {buckets}, captured {opened.captured}")
    return faults


def compare(exact: Outcome, found: Outcome, near_tie: float = NEAR_TIE) -> Comparison:
    """Texts up to where they part, and whether the likeliest tokens were near each other there."""
    num_tokens = num_equal = 0
    is_explained = True
    for seq_id, tokens in exact.tokens.items():
        num_tokens += len(tokens)
        for place, (its, ours) in enumerate(zip(tokens, found.tokens[seq_id], strict=True)):
            if its != ours:
                first, second = exact.logprobs[seq_id][place].top_logprobs[:2]
                is_explained = is_explained and bool(first - second < near_tie)
                break
            num_equal += 1
    return Comparison(num_tokens, num_equal, is_explained and 2 * num_equal > num_tokens)


def _differences(name: str, expected: Outcome, found: Outcome) -> list[str]:
    different = sum(tokens != found.tokens[seq_id] for seq_id, tokens in expected.tokens.items())
    return [f"{name}: {different} texts differ from eager steps"] if different else []


def _row(name: str, opened: OpenExecutor, found: Comparison) -> Row:
    return {
        "executor": name,
        "captured buckets": " ".join(map(str, sorted(opened.captured))),
        "tokens": found.num_tokens,
        "equal to the CPU's": found.num_equal,
        "rest after near ties": found.is_explained,
        "MiB": round(opened.reserved_bytes / 2**20, 1),
    }
