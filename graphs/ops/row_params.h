// How a row of floats was quantised.
#pragma once

#include <cstdint>

namespace chairlift {

// Widest row that may be quantised: more products u8 x s8, each at most 255 * 128, could sum to more than int32 holds.
// Within it acc - zero_point * col_sum, a sum of (q - zero_point) * w, fits too.
constexpr int64_t kMaxQuantizedWidth = 65'793;

// x ~ scale * (q - zero_point).
struct RowParams {
  float scale;
  float zero_point;  // whole, 0 to 255
};

}  // namespace chairlift
