// What the row-wise ops ask of each instruction set: one row per call. numpy twins: graphs/op_twins_rows.py.
#pragma once

#include <cstdint>

#include "isa.h"

namespace chairlift {

// Widest row that may be quantised: more products u8 x s8, each at most 255 * 128, could sum to more than int32 holds.
// Within it acc - zero_point * col_sum, a sum of (q - zero_point) * w, fits too.
constexpr int64_t kMaxQuantizedWidth = 65'793;

constexpr int64_t kScratchPadding = 32;  // kernels load and store whole vectors

// One row of the tensors `row_params` [T, 2]: x ~ scale * (q - zero_point).
struct RowParams {
  float scale;
  float zero_point;  // whole, 0 to 255
};

// What an integer GEMM's columns need to become floats again.
struct Columns {
  const float* scale;      // [N] of the weights
  const int32_t* sum;      // [N] of the int8 weights of each column
  const float* bias;       // [N], or null
};

// One row of an integer GEMM.
struct GemmRow {
  const int32_t* acc;
  RowParams params;
  Columns columns;
};

struct Norm {
  const float* weight;
  float epsilon;
};

// Where a row is quantised to, and how.
struct QuantizedRow {
  int64_t width;
  int64_t rotation;   // block of the Hadamard transform: a power of two that divides the width; 0 none
  float* scratch;     // [width + kScratchPadding]
  uint8_t* q;         // [width]
  RowParams* params;
};

struct RowKernels {
  // out = scale * columns.scale * (acc - zero_point * columns.sum) + bias; `width` columns.
  void (*rescale)(const GemmRow& in, int64_t width, float* out);
  void (*quantize)(const float* x, const QuantizedRow& out);
  void (*norm_quantize)(const float* x, const Norm& norm, const QuantizedRow& out);
  // `total` = residual + rescaled `in`; then as norm_quantize.
  void (*add_norm_quantize)(const float* residual, const GemmRow& in, const Norm& norm, float* total,
                            const QuantizedRow& out);
  // silu(gate) * up; the first out.width columns of `in` are the gate, the next the up half.
  void (*swiglu_quantize)(const GemmRow& in, const QuantizedRow& out);
};

CHAIRLIFT_PER_ISA(const RowKernels& row_kernels())

}  // namespace chairlift
