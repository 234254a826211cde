// What SampleRows asks of each instruction set: one row per call. numpy twin: graphs/op_twins_rows.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace chairlift {

struct SampleRow {
  const float* logits;  // [vocab_size]
  int64_t vocab_size;
  float temperature;  // finite, not negative
  int32_t top_k;      // 0 or less: all
  float top_p;        // within 0 and 1
  float min_p;        // within 0 and 1
  uint64_t seed;
  uint32_t position;
};

constexpr int32_t kNoUsableLogit = -1;  // the row holds NaN or +inf, or nothing but -inf

struct SampleKernels {
  // Scratch for a row of this vocabulary, aligned to 64.
  size_t (*scratch_bytes)(int64_t vocab_size);
  // The chosen token id, or kNoUsableLogit.
  int32_t (*sample)(const SampleRow& row, void* scratch);
};

CHAIRLIFT_PER_ISA(const SampleKernels& sample_kernels())

}  // namespace chairlift
