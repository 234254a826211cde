// What the row-wise ops have in common: making quantised rows, going over rows.
#pragma once

#include <algorithm>
#include <atomic>

#include "op.h"
#include "row_kernels.h"
#include "thread_scratch.h"

namespace chairlift {

constexpr double kTaskNs = 2500.0;  // aimed at per task of a fork: enough to hide handing it out

// Calls body(row) for all rows, in parallel in runs of rows when there is enough to do.
template <class Body>
Status for_rows(Context& context, int64_t num_rows, double row_ns, const Body& body) {
  const int64_t run = std::max<int64_t>(1, static_cast<int64_t>(kTaskNs / row_ns));
  const size_t num_runs = static_cast<size_t>((num_rows + run - 1) / run);
  return context.parallel_for(num_runs, static_cast<int64_t>(row_ns * static_cast<double>(num_rows)), [&](size_t i) {
    const int64_t first = static_cast<int64_t>(i) * run;
    for (int64_t row = first; row < std::min(first + run, num_rows); ++row) body(row);
  });
}

// The attribute `rotation` of the ops that quantise.
struct Rotation {
  int64_t block = 0;

  Status init(const Attributes& attributes) {
    block = attributes.get("rotation", int64_t{0});
    if (block >= 0 && (block & (block - 1)) == 0) return nullptr;
    return error("rotation is %lld; it must be 0 or a power of two", static_cast<long long>(block));
  }

  Status check_width(int64_t width, const char* what) const {
    if (width > kMaxQuantizedWidth) {
      return error("%s has %lld channels; at most %lld keep integer sums within int32", what,
                   static_cast<long long>(width), static_cast<long long>(kMaxQuantizedWidth));
    }
    if (block == 0 || width % block == 0) return nullptr;
    return error("rotation %lld does not divide the %lld channels of %s", static_cast<long long>(block),
                 static_cast<long long>(width), what);
  }
};

// The outputs q and row_params, and the loop over their rows.
struct QuantizedOutput {
  int64_t num_rows = 0;
  int64_t width = 0;
  TensorView q;
  TensorView row_params;

  Status create(Context& context, size_t index, int64_t rows, int64_t channels) {
    num_rows = rows;
    width = channels;
    CHAIRLIFT_TRY(context.output(index, {rows, channels}, &q));
    return context.output(index + 1, {rows, 2}, &row_params);
  }

  // Calls body(row, QuantizedRow) for all rows.
  template <class Body>
  Status for_each(Context& context, const Rotation& rotation, double channel_ns, const Body& body) const {
    std::atomic<bool> is_out_of_memory{false};
    const double row_ns = channel_ns * static_cast<double>(std::max<int64_t>(width, 1));
    CHAIRLIFT_TRY(for_rows(context, num_rows, row_ns, [&](int64_t row) {
      void* memory = thread_scratch(static_cast<size_t>(width + kScratchPadding) * sizeof(float));
      if (memory == nullptr) {
        is_out_of_memory.store(true, std::memory_order_relaxed);
        return;
      }
      body(row, QuantizedRow{width, rotation.block, static_cast<float*>(memory), q.as<uint8_t>() + row * width,
                             row_params.as<RowParams>() + row});
    }));
    return is_out_of_memory ? error("no memory for a row of %lld floats", static_cast<long long>(width)) : nullptr;
  }
};

}  // namespace chairlift
