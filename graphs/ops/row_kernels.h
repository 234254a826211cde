// What stands ahead of the integer GEMM, of each instruction set: one row per call. numpy twins:
// graphs/op_twins_rows.py.
#pragma once

#include <cstdint>

#include "isa.h"
#include "row_params.h"

namespace chairlift {

constexpr int64_t kScratchPadding = 32;  // kernels load and store whole vectors

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
  void (*quantize)(const float* x, const QuantizedRow& out);
  void (*norm_quantize)(const float* x, const Norm& norm, const QuantizedRow& out);
  // `total` = residual + delta; then as norm_quantize.
  void (*add_norm_quantize)(const float* residual, const float* delta, const Norm& norm, float* total,
                            const QuantizedRow& out);
  // silu(gate) * up; the first out.width columns of `gate_up` are the gate, the next the up half.
  void (*swiglu_quantize)(const float* gate_up, const QuantizedRow& out);
};

CHAIRLIFT_PER_ISA(const RowKernels& row_kernels())

}  // namespace chairlift
