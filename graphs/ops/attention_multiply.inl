// The one matrix product of attention, register-blocked: C = A B, or C = alpha C + A B, a few rows at a time.
//
// Every element of C is one chain of fused multiply-adds over k = 0, 1, 2, ...; how many rows and columns share the
// registers changes the speed and not a bit of the result. Included by paged_attention.inl, inside its namespace.

// Rows and vectors of C held in registers: with B's vectors and one broadcast they about fill the set's register file.
#if defined(CHAIRLIFT_SIMD_AVX512) || defined(CHAIRLIFT_SIMD_NEON)
constexpr int kBlockRows = 6;
constexpr int block_vecs(int) { return 4; }
#elif defined(CHAIRLIFT_SIMD_AVX2)
constexpr int kBlockRows = 6;
constexpr int block_vecs(int num_rows) { return num_rows <= 3 ? 4 : 2; }
#else
constexpr int kBlockRows = 4;
constexpr int block_vecs(int) { return 1; }
#endif

// Rows of B that are worked through at a time: what is looked up for them costs little then.
constexpr int kSteps = 4;

// B as floats in memory, row after row. `steps(k, column)` is where kSteps rows are read from there on; `prefetch` is a
// hook for those that want something done along the way, and after the last row.
struct DenseRows {
  struct Steps {
    const float* first;
    int64_t stride;
    CHAIRLIFT_INLINE_MEMBER Vec load_vec(int step, int column) const { return load(first + step * stride + column); }
  };
  const float* rows;
  int64_t stride;
  template <int kVecs>
  CHAIRLIFT_INLINE_MEMBER Steps steps(int k, int column) const {
    return {rows + k * stride + column, stride};
  }
  CHAIRLIFT_INLINE_MEMBER void prefetch(int) const {}
  CHAIRLIFT_INLINE_MEMBER void prefetch_rest(int) const {}
};

template <int kCount, int kRows, int kVecs, class B>
CHAIRLIFT_INLINE void multiply_steps(const float* const* a, int k, const B& b, int column, Vec (&sum)[kRows][kVecs]) {
  const auto steps = b.template steps<kVecs>(k, column);
  for (int i = 0; i < kCount; ++i) {
    Vec b_k[kVecs];
    for (int v = 0; v < kVecs; ++v) b_k[v] = steps.load_vec(i, v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec a_rk = set1(a[r][k + i]);
      for (int v = 0; v < kVecs; ++v) sum[r][v] = fma(a_rk, b_k[v], sum[r][v]);
    }
  }
}

template <int kRows, int kVecs, bool kScaleC, class B>
CHAIRLIFT_INLINE void multiply_block(const float* const* a, const float* alpha, int depth, const B& b, int column,
                                     float* c, int c_stride) {
  Vec sum[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) {
      sum[r][v] = kScaleC ? mul(load(c + r * c_stride + column + v * kLanes), set1(alpha[r])) : zero();
    }
  }
  int k = 0;
  for (; k + kSteps <= depth; k += kSteps) {
    if (column == 0) b.prefetch(k);
    multiply_steps<kSteps>(a, k, b, column, sum);
  }
  if (column == 0) b.prefetch_rest(k);
  for (; k < depth; ++k) multiply_steps<1>(a, k, b, column, sum);
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) store(c + r * c_stride + column + v * kLanes, sum[r][v]);
  }
}

template <int kRows, bool kScaleC, class B>
[[gnu::noinline]] static void multiply_rows(const float* const* a, const float* alpha, int depth, const B& b,
                                            int num_vecs, float* c, int c_stride) {
  constexpr int kVecs = block_vecs(kRows);
  int v = 0;
  for (; v + kVecs <= num_vecs; v += kVecs) {
    multiply_block<kRows, kVecs, kScaleC>(a, alpha, depth, b, v * kLanes, c, c_stride);
  }
  for (; v < num_vecs; ++v) multiply_block<kRows, 1, kScaleC>(a, alpha, depth, b, v * kLanes, c, c_stride);
}

template <int kRows, bool kScaleC, class B>
CHAIRLIFT_INLINE void multiply_rest(int num_rows, const float* const* a, const float* alpha, int depth, const B& b,
                                    int num_vecs, float* c, int c_stride) {
  if constexpr (kRows > 0) {
    if (num_rows == kRows) {
      multiply_rows<kRows, kScaleC>(a, alpha, depth, b, num_vecs, c, c_stride);
    } else {
      multiply_rest<kRows - 1, kScaleC>(num_rows, a, alpha, depth, b, num_vecs, c, c_stride);
    }
  }
}

// C[num_rows, num_vecs * kLanes] = A[num_rows, depth] B[depth, ...], plus alpha[row] * C when kScaleC. `a`: rows of A.
template <bool kScaleC, class B>
CHAIRLIFT_INLINE void multiply(int num_rows, const float* const* a, const float* alpha, int depth, const B& b,
                               int num_vecs, float* c, int c_stride) {
  int row = 0;
  for (; row + kBlockRows <= num_rows; row += kBlockRows) {
    multiply_rows<kBlockRows, kScaleC>(a + row, alpha + row, depth, b, num_vecs, c + row * c_stride, c_stride);
  }
  multiply_rest<kBlockRows - 1, kScaleC>(num_rows - row, a + row, alpha + row, depth, b, num_vecs, c + row * c_stride,
                                         c_stride);
}
