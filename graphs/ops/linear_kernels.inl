// The integer GEMM, compiled once per instruction set.
//
// Rows are copied once into the form that the set multiplies by, and cut into strips. Columns go by in blocks, all
// strips over one before the next, so that weights stay in the caches next to the core and come from memory all the
// time. Of a strip and a block, a tile of sums stays in registers while the input channels pass by.
//
// What bounds it: reading weights up to four rows, from there on the multipliers. Versions on AVX2 (Zen 3, shared; all
// GEMMs of SmolLM2-135M; time of ONNX Runtime's MatMulInteger with uint8 weights, without rescaling, over this one's,
// with it, in turns; one or two threads), at 1, 4, 16 and 160 rows:
//   as the compiler orders it, sums spilled from the registers    0.80  0.87  0.65  0.60
//   products and sums as one block, in place                      0.81  0.93  0.84  0.87
//   rows copied once per call, not per task                       0.85  1.20  1.01  0.94
//   weights fetched two panels ahead, panels whole for 1 to 2 rows 1.04  1.15  0.98  1.00
// On AVX-512 VNNI (Zen 5), one thread, against the version before: all strips over a block before the next, memory read
// evenly meanwhile: 1.00, 1.00, 1.30, 1.09 times as fast; with AVX2 on the same machine 1.03, 0.98, 0.96, 0.98.
// There too, gate and GEMM of 1,536 to 576 channels on one thread: rows side by side, not interleaved within a strip:
// 0.99, 1.04, 1.05, 1.04 times as fast; and the channels of rows that threads prepare side by side share no line.
// All GEMMs there on one thread, since a tile's sums become floats by copies of its pointers: 1.04 times as fast at 72
// rows, 1.02 at 512, 91 and 93 % of the multipliers' peak. Most of the rest is a cost per tile, large for 576 channels;
// keeping those sums in registers, huge pages for rows and results, and prefetching into L2 only gain nothing.
#include <cstring>

#include "linear_kernels.h"
#include "simd.h"
#include "simd_dot.h"
#include "simd_words.h"

namespace chairlift::CHAIRLIFT_SIMD_NS {
namespace {

constexpr int kLineBytes = 64;
constexpr int kVectorsPerPanel = static_cast<int>(kPanelColumns) / kDotColumns;
constexpr int64_t kBlockPanels = tile_vectors(1) > kVectorsPerPanel ? tile_vectors(1) / kVectorsPerPanel : 1;

// As many columns as keep the multipliers busy: with fewer, a row's sums wait for each other.
constexpr int64_t kHalfBlockPanels = kBlockPanels == 4 ? 2 : 0;

constexpr int kAheadShift = 10;  // steps are in 1/1024 bytes: many strips prefetch less than a byte per group each

// A block to prefetch, in equal parts by all strips.
struct Ahead {
  const int8_t* block;
  int64_t strip;
  int64_t num_strips;
};

// Where rows and columns of a tile lie.
struct Tile {
  const DotInput* rows;    // [rows, row_stride]
  int64_t row_stride;
  const int8_t* weights;   // of the tile's first column
  int64_t panel_bytes;
  int64_t num_groups;
  const int8_t* ahead;     // prefetched, `ahead_step` / 1024 bytes further in each group
  int64_t ahead_step;
};

// sums[kRows][kVectors * kDotColumns] = rows x weights.
template <int kRows, int kVectors>
CHAIRLIFT_INLINE void multiply(const Tile& tile, int32_t* sums) {
  constexpr int kVectorBytes = kDotColumns * static_cast<int>(kGroupChannels);
  DotSums acc[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) acc[r][v] = dot_zero();
  }
  for (int64_t group = 0; group < tile.num_groups; ++group) {
    const int8_t* weights = tile.weights + group * kGroupBytes;
    DotWeights columns[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      columns[v] = dot_load(weights + v / kVectorsPerPanel * tile.panel_bytes + v % kVectorsPerPanel * kVectorBytes);
    }
    for (int byte = 0; byte < kVectors * kVectorBytes; byte += kLineBytes) {
      __builtin_prefetch(tile.ahead + (group * tile.ahead_step >> kAheadShift) + byte);
    }
    for (int r = 0; r < kRows; ++r) {
      const DotRow row = dot_broadcast(tile.rows + r * tile.row_stride + group * kGroupChannels);
      for (int v = 0; v < kVectors; ++v) dot(&acc[r][v], row, columns[v]);
    }
  }
  for (int r = 0; r < kRows; ++r) dot_store(sums + r * kVectors * kDotColumns, acc[r]);
}

// The sums of one row's tile become floats. Multiplications and additions are separately rounded, in a fixed order.
CHAIRLIFT_INLINE void rescale(const RowParams& params, const Columns& columns, const int32_t* sums, int num_columns,
                              float* y) {
  const Vec row_scale = set1(params.scale);
  const Words zero_point = words(static_cast<uint32_t>(static_cast<int32_t>(params.zero_point) - kDotOffset));
  for (int i = 0; i < num_columns; i += kLanes) {
    const int lanes = num_columns - i < kLanes ? num_columns - i : kLanes;
    const bool is_whole = lanes == kLanes;
    const Words column_sums = is_whole ? load_words(columns.sum + i) : load_words_partial(columns.sum + i, lanes);
    const Vec column_scale = is_whole ? load(columns.scale + i) : load_partial(columns.scale + i, lanes);
    const Vec sum = to_float(sub(load_words(sums + i), mul(zero_point, column_sums)));
    Vec result = mul(mul(row_scale, column_scale), sum);
    if (columns.bias != nullptr) {
      result = add(result, is_whole ? load(columns.bias + i) : load_partial(columns.bias + i, lanes));
    }
    if (is_whole) {
      store(y + i, result);
    } else {
      store_partial(y + i, result, lanes);
    }
  }
}

// All columns of a tile for one strip.
template <int kRows, int kVectors>
CHAIRLIFT_INLINE void compute_tile(const LinearCall& call, int64_t row, int64_t column, const Tile& tile) {
  constexpr int kColumns = kVectors * kDotColumns;
  alignas(64) int32_t sums[kRows * kColumns];
  multiply<kRows, kVectors>(tile, sums);
  // Copies, which what is stored cannot change.
  const RowParams* params = call.params + row;
  const int64_t width = call.out_features;
  float* y = call.y + row * width + column;
  const float* bias = call.columns.bias == nullptr ? nullptr : call.columns.bias + column;
  const Columns columns{call.columns.scale + column, call.columns.sum + column, bias};
  if (width - column >= kColumns) {
    for (int r = 0; r < kRows; ++r) rescale(params[r], columns, sums + r * kColumns, kColumns, y + r * width);
  } else {
    const int left = static_cast<int>(width - column);
    for (int r = 0; r < kRows; ++r) rescale(params[r], columns, sums + r * kColumns, left, y + r * width);
  }
}

// Strips of nearly equal height: one of a single row would read all weights for little work.
int64_t num_strips(int64_t num_rows) { return (num_rows + kStripRows - 1) / kStripRows; }
int64_t first_row(int64_t num_rows, int64_t strip) { return strip * num_rows / num_strips(num_rows); }

// From one prepared row to the next. Threads that prepare rows share no line; an odd number of lines, so that the rows
// of a strip lie in different sets of the cache, whatever their width.
int64_t row_stride(int64_t in_features) {
  constexpr int64_t kLineInputs = kLineBytes / static_cast<int64_t>(sizeof(DotInput));
  return ((in_features + kLineInputs - 1) / kLineInputs | 1) * kLineInputs;
}

int64_t prepared_bytes(int64_t num_rows, int64_t in_features) {
  return num_rows * row_stride(in_features) * static_cast<int64_t>(sizeof(DotInput));
}

// Zeros fill the last group.
void prepare(const LinearCall& call, int64_t row, const uint8_t* q, void* prepared) {
  DotInput* out = static_cast<DotInput*>(prepared) + row * row_stride(call.in_features);
  int64_t channel = 0;
  for (; channel + kDotCopied <= call.in_features; channel += kDotCopied) dot_copy(q + channel, out + channel);
  if (channel < call.in_features) {
    uint8_t rest[kDotCopied] = {};
    std::memcpy(rest, q + channel, static_cast<size_t>(call.in_features - channel));
    dot_copy(rest, out + channel);
  }
}

// All columns of panels first..end-1, a block at most, for one strip.
template <int kRows>
void compute_strip(const LinearCall& call, int64_t row, int64_t first_panel, int64_t end_panel, const DotInput* rows,
                   const Ahead& ahead) {
  constexpr int kVectors = tile_vectors(kRows);
  constexpr int64_t kTileColumns = kVectors * kDotColumns;
  const int64_t ahead_step = (kTileColumns * kGroupChannels << kAheadShift) / ahead.num_strips;
  Tile tile{rows, row_stride(call.in_features), nullptr, call.panel_bytes(), call.num_groups(), nullptr, ahead_step};
  const int64_t first = first_panel * kPanelColumns;
  const int64_t end = end_panel * kPanelColumns;
  const int64_t num_tiles = (end - first) / kTileColumns;
  const auto at = [&](int64_t c) {
    return call.weights + c / kPanelColumns * tile.panel_bytes + c % kPanelColumns * kGroupChannels;
  };
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t column = first + i * kTileColumns;
    if (column >= call.out_features) return;
    tile.weights = at(column);
    tile.ahead = ahead.block + ((i * ahead.num_strips + ahead.strip) * tile.num_groups * ahead_step >> kAheadShift);
    compute_tile<kRows, kVectors>(call, row, column, tile);
  }
  if constexpr (kTileColumns > kPanelColumns) {
    int64_t column = first + num_tiles * kTileColumns;
    if constexpr (kHalfBlockPanels > 0) {
      constexpr int64_t kHalfColumns = kHalfBlockPanels * kPanelColumns;
      if (column + kHalfColumns <= end) {
        tile.weights = tile.ahead = at(column);
        compute_tile<kRows, kHalfColumns / kDotColumns>(call, row, column, tile);
        column += kHalfColumns;
      }
    }
    for (; column < end; column += kPanelColumns) {
      tile.weights = tile.ahead = at(column);
      compute_tile<kRows, kVectorsPerPanel>(call, row, column, tile);
    }
  }
}

template <int kRows>
void compute_rows(const LinearCall& call, int64_t row, int64_t count, int64_t first_panel, int64_t end_panel,
                  const DotInput* rows, const Ahead& ahead) {
  if constexpr (kRows > 0) {
    if (count == kRows) {
      compute_strip<kRows>(call, row, first_panel, end_panel, rows, ahead);
    } else {
      compute_rows<kRows - 1>(call, row, count, first_panel, end_panel, rows, ahead);
    }
  }
}

// A block is read from memory while all strips pass over the one two blocks before it.
void compute(const LinearCall& call, int64_t first_panel, int64_t end_panel, const void* prepared) {
  const int64_t strips = num_strips(call.num_rows);
  for (int64_t panel = first_panel; panel < end_panel; panel += kBlockPanels) {
    const int64_t block_end = panel + kBlockPanels < end_panel ? panel + kBlockPanels : end_panel;
    const int64_t next = panel + 2 * kBlockPanels;  // behind a task's last block begins another task
    const int8_t* ahead = call.weights + (next + kBlockPanels <= call.num_panels() ? next : panel) * call.panel_bytes();
    for (int64_t strip = 0; strip < strips; ++strip) {
      const int64_t first = first_row(call.num_rows, strip);
      const DotInput* rows = static_cast<const DotInput*>(prepared) + first * row_stride(call.in_features);
      compute_rows<kStripRows>(call, first, first_row(call.num_rows, strip + 1) - first, panel, block_end, rows,
                               {ahead, strip, strips});
    }
  }
}

}  // namespace

const LinearKernels& linear_kernels() {
  static constexpr LinearKernels kernels = {kBlockPanels, kHalfBlockPanels, prepared_bytes, prepare, compute};
  return kernels;
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
