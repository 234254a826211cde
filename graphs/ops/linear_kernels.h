// The integer GEMM: what it asks of each instruction set. numpy twin: `integer_linear` in graphs/op_twins_rows.py.
#pragma once

#include <cstdint>

#include "isa.h"
#include "row_params.h"

namespace chairlift {

// Weights are int8 [N / 16, K / 4, 16, 4], both quotients rounded up: panels of 16 output channels; within a panel the
// same four input channels of all its outputs lie together. Whatever the width of a vector, a kernel reads a panel from
// front to end, and four products at a time sum up within a lane.
constexpr int64_t kPanelColumns = 16;
constexpr int64_t kGroupChannels = 4;
constexpr int64_t kGroupBytes = kPanelColumns * kGroupChannels;

// What an integer GEMM's columns need to become floats again.
struct Columns {
  const float* scale;  // [N] of the weights
  const int32_t* sum;  // [N] of the int8 weights of each column
  const float* bias;   // [N], or null
};

// y = scale * columns.scale * ((q - zero_point) . weights) + bias
struct LinearCall {
  int64_t num_rows;        // T
  int64_t in_features;     // K
  int64_t out_features;    // N
  const RowParams* params; // [T]
  const int8_t* weights;
  Columns columns;
  float* y;                // [T, N]

  int64_t num_panels() const { return (out_features + kPanelColumns - 1) / kPanelColumns; }
  int64_t num_groups() const { return (in_features + kGroupChannels - 1) / kGroupChannels; }
  int64_t panel_bytes() const { return num_groups() * kGroupBytes; }
};

struct LinearKernels {
  int64_t task_panels;  // panels of the widest tile: `compute` is best given a multiple
  int64_t half_task_panels;  // of half the widest tile, if one is worth giving alone; else 0
  // All rows are copied by `prepare`, each on its own, into one buffer of this size, a multiple of
  // 64 and aligned to it.
  int64_t (*prepared_bytes)(int64_t num_rows, int64_t in_features);
  void (*prepare)(const LinearCall& call, int64_t row, const uint8_t* q, void* prepared);  // q [K]
  // Columns of panels first..end-1, all rows. Sums are exact, so results are the same bits on every set.
  void (*compute)(const LinearCall& call, int64_t first_panel, int64_t end_panel, const void* prepared);
};

CHAIRLIFT_PER_ISA(const LinearKernels& linear_kernels())

// Of the set in use; the next narrower set's where it needs an instruction that the machine lacks.
const LinearKernels& active_linear_kernels();

}  // namespace chairlift
