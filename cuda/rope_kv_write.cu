// Norm and rotation of queries and keys, and keys and values into their slots. README.md has the signature.
//
//   qkv [num_tokens, QH + 2 KVH, D] of T -> q [num_tokens, QH, D] of T, kv [num_blocks, 2, KVH, BLOCK_SIZE, D]
//   grid (num_tokens, ceil((QH + 2 KVH) / 4)), 128 threads. A warp takes a head; a lane loads neighbouring pairs, 4
//   bytes each, so that a warp reads 128 bytes in a row.
//
// The warp keeps its head in shared memory as float32 [D], since the partner of a dimension, rotary_half further, may
// be any lane's. Values go from register to register.
//
// Bound: by reading qkv and writing it again once, and for few tokens by the launch. History: 1. as shipped.
#include "kv_buffer.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kPairs = kHeadDim / 2;

// x as e4m3: to the nearest, ties to even, at most 448. Only sm_89 and later have an instruction for it. NaN has a code
// here, which attention reads as 480 all the same: it has no time to look for it.
DEVICE u32 e4m3_bits(float x) {
  if (x != x) return 0x7fu;
  const u32 bits = __float_as_uint(x);
  const float size = fminf(fabsf(x), 448.0f);
  u32 code;
  if (size < 0x1p-6f) {  // below the normal numbers: steps of 2^-9
    code = static_cast<u32>(__float2int_rn(size * 0x1p9f));
  } else {
    const u32 wide = __float_as_uint(size);
    code = ((wide + 0x7ffffu + (wide >> 20 & 1u)) >> 20) - ((127u - 7u) << 3);
  }
  return (bits >> 31 << 7) | code;
}

struct Slot {
  char* key;  // of this head; null: write nothing
  long value_bytes;

  DEVICE Slot(void* kv, int slot, int num_kv_heads, int kv_head) {
    value_bytes = static_cast<long>(num_kv_heads) * kBlockSize * kHeadDim * static_cast<long>(sizeof(Kv));
    const long row = (slot / kBlockSize * 2L * num_kv_heads + kv_head) * kBlockSize + slot % kBlockSize;
    key = slot < 0 ? nullptr : static_cast<char*>(kv) + row * kHeadDim * static_cast<long>(sizeof(Kv));
  }
};

// Dimensions 2 * pair and the next, of a key or value whose stored numbers are the true ones times `inverse_scale`.
DEVICE void write_pair(char* row, int pair, float first, float second, float inverse_scale) {
  if constexpr (KV_FP8) {
    const u32 codes = e4m3_bits(first * inverse_scale) | e4m3_bits(second * inverse_scale) << 8;
    reinterpret_cast<u16*>(row)[pair] = static_cast<u16>(codes);
  } else {
    reinterpret_cast<u32*>(row)[pair] = pack<T>(saturate<T>(first), saturate<T>(second));
  }
}

// The head in shared memory as float32, normalised if there is a weight.
DEVICE void load_head(const u32* from, const float* weight, float epsilon, float* head) {
  float squares = 0.0f;
#pragma unroll
  for (int pair = lane_of_thread(); pair < kPairs; pair += 32) {
    const u32 both = from[pair];
    const float first = first_of<T>(both);
    const float second = second_of<T>(both);
    squares += first * first + second * second;
    *reinterpret_cast<float2*>(head + 2 * pair) = float2{first, second};
  }
  if (weight != nullptr) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(kWholeWarp, squares, distance);
    const float factor = 1.0f / sqrtf(squares / kHeadDim + epsilon);
#pragma unroll
    for (int pair = lane_of_thread(); pair < kPairs; pair += 32) {
      head[2 * pair] *= factor * weight[2 * pair];
      head[2 * pair + 1] *= factor * weight[2 * pair + 1];
    }
  }
  __syncwarp();
}

DEVICE void rotate_head(const float* cos, const float* sin, int half, float* head) {
  for (int i = lane_of_thread(); i < half; i += 32) {
    const float first = head[i];
    const float second = head[half + i];
    head[i] = first * cos[i] - second * sin[i];
    head[half + i] = second * cos[i] + first * sin[i];
  }
  __syncwarp();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    rope_kv_write(const T* qkv, const int* positions, const int* slots, const float* cos, const float* sin,
                  const float* q_norm, const float* k_norm, T* q, void* kv, int num_heads, int num_kv_heads,
                  int rotary_half, float norm_epsilon, float k_scale, float v_scale) {
  extern __shared__ __align__(16) char smem[];
  const long token = blockIdx.x;
  const int index = blockIdx.y * kWarps + warp_of_thread();
  const int num_all = num_heads + 2 * num_kv_heads;
  if (index >= num_all) return;  // the warp as a whole; there is no barrier of the block below
  const u32* from = reinterpret_cast<const u32*>(qkv + (token * num_all + index) * kHeadDim);
  if (index >= num_heads + num_kv_heads) {
    const Slot slot(kv, slots[token], num_kv_heads, index - num_heads - num_kv_heads);
    if (slot.key == nullptr) return;
    const float inverse_scale = 1.0f / v_scale;
#pragma unroll
    for (int pair = lane_of_thread(); pair < kPairs; pair += 32) {
      const u32 both = from[pair];
      write_pair(slot.key + slot.value_bytes, pair, first_of<T>(both), second_of<T>(both), inverse_scale);
    }
    return;
  }

  const bool is_query = index < num_heads;
  float* head = reinterpret_cast<float*>(smem) + warp_of_thread() * kHeadDim;
  const long angles = static_cast<long>(positions[token]) * rotary_half;
  load_head(from, is_query ? q_norm : k_norm, norm_epsilon, head);
  rotate_head(cos + angles, sin + angles, rotary_half, head);
  if (is_query) {
    u32* to = reinterpret_cast<u32*>(q + (token * num_heads + index) * kHeadDim);
#pragma unroll
    for (int pair = lane_of_thread(); pair < kPairs; pair += 32) to[pair] = pack<T>(head[2 * pair], head[2 * pair + 1]);
    return;
  }
  const Slot slot(kv, slots[token], num_kv_heads, index - num_heads);
  if (slot.key == nullptr) return;
  const float inverse_scale = 1.0f / k_scale;
#pragma unroll
  for (int pair = lane_of_thread(); pair < kPairs; pair += 32) {
    write_pair(slot.key, pair, head[2 * pair], head[2 * pair + 1], inverse_scale);
  }
}
