"""The running sequences as a struct of arrays: dense rows, swap-remove."""

import numpy as np

from service.core.types import Float32Array, Int32Array, Int64Array, SamplingParams


class BatchState:
    """Per-row columns of the running sequences. Rows 0..num_rows-1 are live and dense; owned by the engine thread.

    The scheduler writes; an executor reads the columns of the rows in its plan.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks_per_seq = -(-max_model_len // block_size)
        self.num_rows = 0
        self.seq_ids: Int64Array = np.full(max_num_seqs, -1, np.int64)  # [max_num_seqs]
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), np.int32)  # prompt, then output
        self.num_prompt_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)  # known tokens: prompt and output so far
        self.num_computed_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)  # tokens whose K and V are in blocks
        self.block_table: Int32Array = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self.num_blocks: Int32Array = np.zeros(max_num_seqs, np.int32)  # valid entries of each block table row
        self.temperature: Float32Array = np.zeros(max_num_seqs, np.float32)
        self.top_k: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.top_p: Float32Array = np.ones(max_num_seqs, np.float32)
        self.min_p: Float32Array = np.zeros(max_num_seqs, np.float32)
        self.seed: Int64Array = np.zeros(max_num_seqs, np.int64)  # the 64 bits of SamplingParams.seed
        self.sampling: list[SamplingParams | None] = [None] * max_num_seqs  # the whole parameters, for rare features
        self.eos_token_ids: list[tuple[int, ...]] = [()] * max_num_seqs
