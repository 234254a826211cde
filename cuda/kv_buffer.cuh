// The KV buffer, [num_blocks, 2, KVH, BLOCK_SIZE, HEAD_DIM], as all kernels that touch it know it.
#pragma once

#include "scalar.cuh"

using T = SCALAR;  // of queries and outputs
#if KV_FP8
using Kv = u8;  // e4m3
#else
using Kv = T;
#endif

constexpr int kHeadDim = HEAD_DIM;
constexpr int kBlockSize = BLOCK_SIZE;
