// The op families of the library. Each file of ops appends its own to the list that RegisterCustomOps hands over.
#pragma once

#include "op.h"

namespace chairlift {

void append_attention_ops(OpList& ops);  // PagedAttention
void append_linear_ops(OpList& ops);     // QuantizedLinear and the GEMMs with a norm or a gate ahead of them
void append_sample_ops(OpList& ops);     // SampleRows

// For the CUDA provider.
void append_attention_cuda_ops(OpList& ops);
void append_sample_cuda_ops(OpList& ops);

// The CUDA ops again, as CPU kernels in the domain `chairlift.simulated`: the kernels that they launch are simulated.
void append_simulated_attention_ops(OpList& ops);
void append_simulated_sample_ops(OpList& ops);

}  // namespace chairlift
