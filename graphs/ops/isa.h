// Which instruction set the kernels run on: found out once at run time, overridable for tests and comparisons.
//
// A kernel is written once, in an .inl file, over the vector type of simd.h, and compiled once per instruction set from
// NAME_avx512.cc, NAME_avx2.cc, NAME_neon.cc and NAME_generic.cc (the build finds them by suffix and gives each its
// flags). Each copy lives in the namespace of its set and offers one function, say `row_kernels()`, that returns a
// table of function pointers:
//
//   CHAIRLIFT_PER_ISA(const RowKernels& row_kernels())          // in a header: declares all of them
//   const RowKernels& kernels = CHAIRLIFT_DISPATCH(row_kernels());
#pragma once

#if defined(__x86_64__) || defined(_M_X64)
#define CHAIRLIFT_X86 1
#elif defined(__aarch64__)
#define CHAIRLIFT_ARM 1
#endif

namespace chairlift {

enum class Isa { generic, avx2, avx512, neon };

// The set in use. Thread-safe; a change takes effect at the next call of a kernel.
Isa active_isa();

// Whether the machine has its widest set's exact dot products of bytes (AVX-512 VNNI, Arm's dot products).
bool has_int8_dot();

}  // namespace chairlift

#if CHAIRLIFT_X86
#define CHAIRLIFT_PER_ISA(declaration) \
  namespace generic {                  \
  declaration;                         \
  }                                    \
  namespace avx2 {                     \
  declaration;                         \
  }                                    \
  namespace avx512 {                   \
  declaration;                         \
  }
#define CHAIRLIFT_DISPATCH(call)                                                     \
  (::chairlift::active_isa() == ::chairlift::Isa::avx512 ? ::chairlift::avx512::call \
   : ::chairlift::active_isa() == ::chairlift::Isa::avx2 ? ::chairlift::avx2::call   \
                                                         : ::chairlift::generic::call)
#elif CHAIRLIFT_ARM
#define CHAIRLIFT_PER_ISA(declaration) \
  namespace generic {                  \
  declaration;                         \
  }                                    \
  namespace neon {                     \
  declaration;                         \
  }
#define CHAIRLIFT_DISPATCH(call) \
  (::chairlift::active_isa() == ::chairlift::Isa::neon ? ::chairlift::neon::call : ::chairlift::generic::call)
#else
#define CHAIRLIFT_PER_ISA(declaration) \
  namespace generic {                  \
  declaration;                         \
  }
#define CHAIRLIFT_DISPATCH(call) (::chairlift::generic::call)
#endif
