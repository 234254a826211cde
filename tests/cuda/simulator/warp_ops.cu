// Operations of a warp as inline PTX; out[i] belongs to thread i of one block.
typedef unsigned int u32;
typedef unsigned short u16;

#define SHUFFLE(mode)                                                                                          \
  extern "C" __global__ void shfl_##mode(const u32* value, const u32* b, const u32* c, u32 mask, u32* out) {   \
    const u32 i = threadIdx.x;                                                                                 \
    u32 got = 0, in_range = 0;                                                                                 \
    if (mask >> (i & 31) & 1)                                                                                  \
      asm volatile(                                                                                            \
          "{ .reg .pred p; shfl.sync." #mode ".b32 %0|p, %2, %3, %4, %5; selp.u32 %1, 1, 0, p; }"              \
          : "=r"(got), "=r"(in_range)                                                                          \
          : "r"(value[i]), "r"(b[i]), "r"(c[i]), "r"(mask));                                                   \
    out[2 * i] = got;                                                                                          \
    out[2 * i + 1] = in_range;                                                                                 \
  }
SHUFFLE(up)
SHUFFLE(down)
SHUFFLE(bfly)
SHUFFLE(idx)

#define VOTE(name, text)                                                                             \
  extern "C" __global__ void name(const u32* value, u32 mask, u32* out) {                            \
    const u32 i = threadIdx.x;                                                                       \
    u32 got = 0;                                                                                     \
    if (mask >> (i & 31) & 1)                                                                        \
      asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; " text " }" : "=r"(got) : "r"(value[i]), "r"(mask)); \
    out[i] = got;                                                                                    \
  }
VOTE(vote_ballot, "vote.sync.ballot.b32 %0, p, %2;")
VOTE(vote_all, "vote.sync.all.pred q, p, %2; selp.u32 %0, 1, 0, q;")
VOTE(vote_any, "vote.sync.any.pred q, p, %2; selp.u32 %0, 1, 0, q;")
VOTE(vote_uni, "vote.sync.uni.pred q, p, %2; selp.u32 %0, 1, 0, q;")
VOTE(match_any, "match.any.sync.b32 %0, %1, %2;")
VOTE(match_all, "match.all.sync.b32 %0|q, %1, %2; @!q mov.u32 %0, 77;")
VOTE(redux_add, "redux.sync.add.u32 %0, %1, %2;")
VOTE(redux_min_s32, "redux.sync.min.s32 %0, %1, %2;")
VOTE(redux_max_u32, "redux.sync.max.u32 %0, %1, %2;")
VOTE(redux_and, "redux.sync.and.b32 %0, %1, %2;")
VOTE(redux_xor, "redux.sync.xor.b32 %0, %1, %2;")

// Loads `count` 8x8 matrices from the rows at element offsets `rows`, one for each lane, of 2048 elements.
template <int count, bool transposed>
__device__ __forceinline__ void load_matrices(const u16* in, const u32* rows, u32* out) {
  __shared__ __align__(16) u16 cells[2048];
  for (u32 i = threadIdx.x; i < 2048; i += 32) cells[i] = in[i];
  __syncwarp();
  u32 r[4] = {0, 0, 0, 0};
  const u32 row = (u32)__cvta_generic_to_shared(cells + rows[threadIdx.x]);
#define LDMATRIX(shape, list, ...) asm volatile("ldmatrix.sync.aligned.m8n8." shape ".shared.b16 " list : __VA_ARGS__ : "r"(row) : "memory")
  if constexpr (count == 1 && !transposed) LDMATRIX("x1", "{%0}, [%1];", "=r"(r[0]));
  if constexpr (count == 1 && transposed) LDMATRIX("x1.trans", "{%0}, [%1];", "=r"(r[0]));
  if constexpr (count == 2 && !transposed) LDMATRIX("x2", "{%0,%1}, [%2];", "=r"(r[0]), "=r"(r[1]));
  if constexpr (count == 2 && transposed) LDMATRIX("x2.trans", "{%0,%1}, [%2];", "=r"(r[0]), "=r"(r[1]));
  if constexpr (count == 4 && !transposed)
    LDMATRIX("x4", "{%0,%1,%2,%3}, [%4];", "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]));
  if constexpr (count == 4 && transposed)
    LDMATRIX("x4.trans", "{%0,%1,%2,%3}, [%4];", "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]));
  for (int m = 0; m < count; ++m) out[m * 32 + threadIdx.x] = r[m];
}
#define LOAD_MATRICES(name, count, transposed) \
  extern "C" __global__ void name(const u16* in, const u32* rows, u32* out) { load_matrices<count, transposed>(in, rows, out); }
LOAD_MATRICES(ldmatrix_x1, 1, false)
LOAD_MATRICES(ldmatrix_x2, 2, false)
LOAD_MATRICES(ldmatrix_x4, 4, false)
LOAD_MATRICES(ldmatrix_x1_trans, 1, true)
LOAD_MATRICES(ldmatrix_x2_trans, 2, true)
LOAD_MATRICES(ldmatrix_x4_trans, 4, true)

// Fragments as registers: a [32 lanes, 4], b [32, 2], c and d [32, 4].
#define MMA(name, type)                                                                                    \
  extern "C" __global__ void name(const u32* a, const u32* b, const float* c, float* d) {                  \
    const u32 i = threadIdx.x;                                                                             \
    float r[4];                                                                                            \
    for (int j = 0; j < 4; ++j) r[j] = c[i * 4 + j];                                                       \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                    \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                              \
                 : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3])                                          \
                 : "r"(a[i * 4]), "r"(a[i * 4 + 1]), "r"(a[i * 4 + 2]), "r"(a[i * 4 + 3]), "r"(b[i * 2]),  \
                   "r"(b[i * 2 + 1]));                                                                     \
    for (int j = 0; j < 4; ++j) d[i * 4 + j] = r[j];                                                       \
  }
MMA(mma_f16, "f16")
MMA(mma_bf16, "bf16")
