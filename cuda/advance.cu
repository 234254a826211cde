// The next step's tokens, positions, slots and contexts from what was sampled, so that decode steps chain without the
// host. README.md has the signature.
//
//   [num_rows] each, block_table [num_rows, table_stride]; grid (1), 256 threads, a thread takes rows 256 apart
//
// Outputs are other buffers than inputs: run again, it leaves the same. A padding row stays one. A row whose next token
// has no column in the block table gets slot -1: the host ends that sequence. A row that could not be sampled from goes
// on with token 0, so that the embedding finds a row; the host fails it.
//
// Bound: the launch. History: 1. as shipped.
constexpr int kThreads = 256;
constexpr int kBlockSize = BLOCK_SIZE;

extern "C" __global__ void __launch_bounds__(kThreads)
    advance(const int* token, const int* position, const int* slot, const int* block_table, int* next_token,
            int* next_position, int* next_slot, int* next_context, int num_rows, int table_stride) {
  for (int row = threadIdx.x; row < num_rows; row += kThreads) {
    const bool is_padding = slot[row] < 0;
    const int at = is_padding ? 0 : position[row] + 1;
    const int column = at / kBlockSize;
    int into = -1;
    if (!is_padding && column < table_stride) {
      into = block_table[static_cast<long>(row) * table_stride + column] * kBlockSize + at % kBlockSize;
    }
    next_token[row] = is_padding ? 0 : max(token[row], 0);
    next_position[row] = at;
    next_slot[row] = into;
    next_context[row] = is_padding ? 0 : at + 1;
  }
}
