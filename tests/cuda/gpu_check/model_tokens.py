"""A tiny model's tokens: the CUDA executor's, in graphs and without, beside the CPU executor's."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import numpy as np

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
MAX_LOGPROB_ERROR = 0.02  # for the same reason; on host memory it is 0.001, and 0.04 with KV of the wrong places
# Weights, KV, and how near likeliest tokens may be where texts part: by how far their log-probabilities are off.
FORMATS = (
    ("bfloat16", "fp8", 0.4),
    ("bfloat16", "auto", 0.2),
    ("float16", "fp8", 0.2),
    ("int8", "auto", 0.2),
    ("int4", "auto", 0.2),
)
LENGTHS = {"sim": (70, 1, 33), "cuda": (1, 17, 130, 70, 9, 45)}
LONG = {"sim": 40, "cuda": 1_600}  # tokens of a prompt more, whose last chunks are cut over their tiles
CONTEXT = {"sim": 256, "cuda": 2_048}
RETURNING = (70, 45, 70)  # of prompts that are served one by one, the third one as the first
NUM_TOKENS = {"sim": 3, "cuda": 24}


@dataclass(frozen=True)
class Comparison:
    num_tokens: int
    num_equal: int  # up to each text's first difference
    is_explained: bool  # every first difference is at a near tie


def model_tokens(device: CheckDevice) -> Iterator[Row]:
    """Graphs of every number of rows must yield what eager steps yield; all others, up to near ties."""
    model_dir = exported(device.folder / "tiny", "float16", CONTEXT[device.name])
    config = replace(CONFIG, model_dir=model_dir, kv_memory="4MiB")
    asked, plain = _asked(device.name, (*LENGTHS[device.name], LONG[device.name]))
    exact = _on_cpu(config, asked)
    faults = []
    with cuda_executor(device, replace(config, capture="off")) as opened:
        eager = run_requests(opened.executor, asked)
        yield _row("eager", opened, found := compare(exact, eager))
        faults += [] if found.is_explained else ["eager steps differ from the CPU executor"]
        if not (error := logprob_error(exact, eager)) <= MAX_LOGPROB_ERROR:
            faults.append(f"eager steps' log-probabilities are off by {error:.3f}")
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
            if is_exact:
                row, its_faults = step_ahead(opened, plain, exact, eager)
                yield row
                faults += its_faults
    asked = returning(device.name)
    exact = _on_cpu(config, asked)
    with cuda_executor(device, replace(config, capture_buckets=(1,), host_kv_memory="512KiB")) as opened:
        row, its_faults = restore_blocks(opened, asked, exact)
        yield row
        faults += its_faults + _not_captured(str(row["executor"]), opened, (1,))
    if faults:
        raise StepFailedError("; ".join(faults))


def step_ahead(opened: OpenExecutor, plain: list[Request], exact: Outcome, eager: Outcome) -> tuple[Row, list[str]]:
    """Tokens that come from the step before on the device: a row, and faults.

    Rows may be in another order than where steps wait, which attention's sums depend on: near ties may part texts.
    """
    name, ahead = "stepping ahead", run_requests(opened.executor, plain, looks_ahead=True)
    row = _row(name, opened, compare(exact, ahead)) | {"steps ahead": ahead.num_ahead}
    faults = [] if compare(eager, ahead).is_explained else [f"{name}: other tokens than eager steps'"]
    return row, faults if ahead.num_ahead else [*faults, f"{name}: every step waited for the one before"]


def restore_blocks(opened: OpenExecutor, asked: list[Request], exact: Outcome) -> tuple[Row, list[str]]:
    """The prompts of `returning`, one by one, in a KV buffer that holds one of them only: a row, and faults.

    Log-probabilities tell what tokens do not: a tiny model's likeliest tokens hardly depend on what is far away.
    """
    name, limits = "blocks from host memory", opened.executor.limits
    longest = max(len(each.prompt_token_ids) + each.sampling.max_tokens for each in asked)
    tight = {"num_blocks": 1 + -(-longest // limits.block_size), "max_num_seqs": 1}  # the null block, too
    outcome = run_requests(opened.executor, asked, **tight)
    row = _row(name, opened, found := compare(exact, outcome)) | {
        "log-probabilities off by": round(error := logprob_error(exact, outcome), 5),
        "restored blocks": outcome.num_restored_blocks,
    }
    faults = [] if error <= MAX_LOGPROB_ERROR else [f"{name}: log-probabilities are off by {error:.3f}"]
    faults += [] if found.is_explained else [f"{name}: other tokens than the CPU executor's"]
    return row, faults if outcome.num_restored_blocks else [*faults, f"{name}: none was restored"]


def returning(device_name: str) -> list[Request]:
    """A prompt, another, and the first one again, whose blocks have had to leave for the other's."""
    asked, _ = _asked(device_name, RETURNING)
    return [*asked[:2], replace(asked[2], prompt_token_ids=asked[0].prompt_token_ids)]


def model_formats(device: CheckDevice) -> Iterator[Row]:
    """Other weights and KV: every bucket captured, tokens those of the CPU executor up to near ties."""
    faults = []
    asked, plain = _asked(device.name, LENGTHS[device.name])
    for weights, kv_dtype, near_tie in FORMATS[: 1 if device.name == "sim" else None]:
        name = f"{weights} weights, {kv_dtype} KV"
        config = replace(CONFIG, model_dir=exported(device.folder / "tiny", weights))
        exact = _on_cpu(config, asked)
        buckets = (2, config.max_num_seqs)
        with cuda_executor(device, replace(config, kv_dtype=kv_dtype, capture_buckets=buckets)) as opened:
            found = compare(exact, run_requests(opened.executor, plain), near_tie)
            yield _row(name, opened, found)
            faults += [] if found.is_explained else [f"{name}: other tokens than the CPU executor's"]
            faults += _not_captured(name, opened, buckets)
    if faults:
        raise StepFailedError("; ".join(faults))


def exported(folder: Path, weights: str, context: int = 256) -> Path:
    model = MODEL | {"max_position_embeddings": context}
    write_hf(folder / "source", model, hf_tensors(model))
    write_tokenizer_json(folder / "source")
    return export_model(folder / "source", folder / weights, weights, overwrite=True).folder


def _asked(device_name: str, lengths: tuple[int, ...]) -> tuple[list[Request], list[Request]]:
    """Greedy requests with log-probabilities, and the same without."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS[device_name], temperature=0.0, ignore_eos=True, num_logprobs=2)
    asked = requests(sampling, lengths)
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


def logprob_error(exact: Outcome, found: Outcome) -> float:
    """The largest difference of chosen tokens' log-probabilities, up to where texts part."""
    errors = []
    for seq_id, tokens in exact.tokens.items():
        places = zip(tokens, found.tokens[seq_id], exact.logprobs[seq_id], found.logprobs[seq_id], strict=True)
        same = takewhile(lambda place: place[0] == place[1], places)
        errors += [abs(there.chosen - here.chosen) for _, _, there, here in same]
    return float(np.max(errors, initial=0.0))  # NaN, if there is one


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
