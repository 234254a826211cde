// One kernel for each instruction of registers: y[i] = instruction(a[i], b[i], c[i]), as inline PTX, so that the
// compiler cannot choose another. Types by letter: r 32 bits, l 64, h 16, f float, d double.
typedef unsigned short h;
typedef unsigned int r;
typedef unsigned long long l;
typedef float f;
typedef double d;

#define INDEX const int i = blockIdx.x * blockDim.x + threadIdx.x;
#define OP1(name, Y, A, text)                                            \
  extern "C" __global__ void name(const A* a, Y* y) {                    \
    INDEX Y out;                                                         \
    asm volatile(text : "=" #Y(out) : #A(a[i]));                         \
    y[i] = out;                                                          \
  }
#define OP2(name, Y, A, B, text)                                         \
  extern "C" __global__ void name(const A* a, const B* b, Y* y) {        \
    INDEX Y out;                                                         \
    asm volatile(text : "=" #Y(out) : #A(a[i]), #B(b[i]));               \
    y[i] = out;                                                          \
  }
#define OP3(name, Y, A, B, C, text)                                          \
  extern "C" __global__ void name(const A* a, const B* b, const C* c, Y* y) { \
    INDEX Y out;                                                             \
    asm volatile(text : "=" #Y(out) : #A(a[i]), #B(b[i]), #C(c[i]));         \
    y[i] = out;                                                              \
  }

// Products
OP2(mul_lo_s32, r, r, r, "mul.lo.s32 %0, %1, %2;")
OP2(mul_hi_u32, r, r, r, "mul.hi.u32 %0, %1, %2;")
OP2(mul_hi_s32, r, r, r, "mul.hi.s32 %0, %1, %2;")
OP2(mul_wide_u32, l, r, r, "mul.wide.u32 %0, %1, %2;")
OP2(mul_wide_s32, l, r, r, "mul.wide.s32 %0, %1, %2;")
OP2(mul_wide_u16, r, h, h, "mul.wide.u16 %0, %1, %2;")
OP2(mul_hi_u64, l, l, l, "mul.hi.u64 %0, %1, %2;")
OP2(mul_hi_s64, l, l, l, "mul.hi.s64 %0, %1, %2;")
OP3(mad_lo_u32, r, r, r, r, "mad.lo.u32 %0, %1, %2, %3;")
OP3(mad_hi_u32, r, r, r, r, "mad.hi.u32 %0, %1, %2, %3;")
OP3(mad_wide_u32, l, r, r, l, "mad.wide.u32 %0, %1, %2, %3;")
// Division and saturation
OP2(div_s32, r, r, r, "div.s32 %0, %1, %2;")
OP2(rem_s32, r, r, r, "rem.s32 %0, %1, %2;")
OP2(div_u64, l, l, l, "div.u64 %0, %1, %2;")
OP2(rem_u64, l, l, l, "rem.u64 %0, %1, %2;")
OP2(add_sat_s32, r, r, r, "add.sat.s32 %0, %1, %2;")
OP2(sub_sat_s32, r, r, r, "sub.sat.s32 %0, %1, %2;")
OP2(min_s32, r, r, r, "min.s32 %0, %1, %2;")
OP2(max_u32, r, r, r, "max.u32 %0, %1, %2;")
OP1(abs_s32, r, r, "abs.s32 %0, %1;")
OP1(neg_s32, r, r, "neg.s32 %0, %1;")
// 64-bit sums of 32-bit halves through the carry
OP2(add_through_carry, l, l, l,
    "{ .reg .b32 a0, a1, b0, b1, s0, s1; mov.b64 {a0, a1}, %1; mov.b64 {b0, b1}, %2;"
    " add.cc.u32 s0, a0, b0; addc.u32 s1, a1, b1; mov.b64 %0, {s0, s1}; }")
OP2(sub_through_carry, l, l, l,
    "{ .reg .b32 a0, a1, b0, b1, s0, s1; mov.b64 {a0, a1}, %1; mov.b64 {b0, b1}, %2;"
    " sub.cc.u32 s0, a0, b0; subc.u32 s1, a1, b1; mov.b64 %0, {s0, s1}; }")
// Shifts, fields and bits
OP2(shl_b32, r, r, r, "shl.b32 %0, %1, %2;")
OP2(shr_u32, r, r, r, "shr.u32 %0, %1, %2;")
OP2(shr_s32, r, r, r, "shr.s32 %0, %1, %2;")
OP2(shr_s64, l, l, r, "shr.s64 %0, %1, %2;")
OP3(shf_l_wrap, r, r, r, r, "shf.l.wrap.b32 %0, %1, %2, %3;")
OP3(shf_r_wrap, r, r, r, r, "shf.r.wrap.b32 %0, %1, %2, %3;")
OP3(shf_r_clamp, r, r, r, r, "shf.r.clamp.b32 %0, %1, %2, %3;")
OP3(bfe_u32, r, r, r, r, "bfe.u32 %0, %1, %2, %3;")
OP3(bfe_s32, r, r, r, r, "bfe.s32 %0, %1, %2, %3;")
OP3(bfi_b32, r, r, r, r, "bfi.b32 %0, 0xABCDEF12, %1, %2, %3;")
OP3(lop3_xor, r, r, r, r, "lop3.b32 %0, %1, %2, %3, 0x96;")
OP3(lop3_majority, r, r, r, r, "lop3.b32 %0, %1, %2, %3, 0xE8;")
OP3(lop3_select, r, r, r, r, "lop3.b32 %0, %1, %2, %3, 0xCA;")
OP3(prmt_b32, r, r, r, r, "prmt.b32 %0, %1, %2, %3;")
OP1(popc_b32, r, r, "popc.b32 %0, %1;")
OP1(popc_b64, r, l, "popc.b64 %0, %1;")
OP1(clz_b32, r, r, "clz.b32 %0, %1;")
OP1(clz_b64, r, l, "clz.b64 %0, %1;")
OP1(brev_b32, r, r, "brev.b32 %0, %1;")
OP1(bfind_u32, r, r, "bfind.u32 %0, %1;")
OP1(bfind_s32, r, r, "bfind.s32 %0, %1;")
OP1(bfind_shiftamt_u32, r, r, "bfind.shiftamt.u32 %0, %1;")
OP1(not_b32, r, r, "not.b32 %0, %1;")
// Comparisons and selection
OP2(setp_ltu_f32, r, f, f, "{ .reg .pred p; setp.ltu.f32 p, %1, %2; selp.u32 %0, 1, 0, p; }")
OP2(setp_lt_f32, r, f, f, "{ .reg .pred p; setp.lt.f32 p, %1, %2; selp.u32 %0, 1, 0, p; }")
OP2(setp_ne_f32, r, f, f, "{ .reg .pred p; setp.ne.f32 p, %1, %2; selp.u32 %0, 1, 0, p; }")
OP2(setp_num_f32, r, f, f, "{ .reg .pred p; setp.num.f32 p, %1, %2; selp.u32 %0, 1, 0, p; }")
OP2(setp_lo_u32, r, r, r, "{ .reg .pred p; setp.lo.u32 p, %1, %2; selp.u32 %0, 1, 0, p; }")
OP2(setp_lt_s32, r, r, r, "{ .reg .pred p; setp.lt.s32 p, %1, %2; selp.u32 %0, 1, 0, p; }")
OP2(setp_lt_s64, r, l, l, "{ .reg .pred p; setp.lt.s64 p, %1, %2; selp.u32 %0, 1, 0, p; }")
OP2(setp_lt_s16, r, h, h, "{ .reg .pred p; setp.lt.s16 p, %1, %2; selp.u32 %0, 1, 0, p; }")
// 1 where a < b and b < 100, plus 2 where not a < b and b < 100
OP2(setp_two_results, r, r, r,
    "{ .reg .pred p, q, s; .reg .u32 x, y; setp.lt.u32 s, %2, 100; setp.lt.and.u32 p|q, %1, %2, s;"
    " selp.u32 x, 1, 0, p; selp.u32 y, 2, 0, q; or.b32 %0, x, y; }")
OP2(selp_f32, f, f, f, "{ .reg .pred p; setp.gt.f32 p, %1, 0f00000000; selp.f32 %0, %1, %2, p; }")
OP2(selp_b64, l, l, l, "{ .reg .pred p; setp.gt.u64 p, %1, %2; selp.b64 %0, %1, %2, p; }")
OP2(selp_b16, h, h, h, "{ .reg .pred p; setp.gt.u16 p, %1, %2; selp.b16 %0, %1, %2, p; }")
OP2(guarded, r, r, r, "{ .reg .pred p; setp.gt.u32 p, %1, %2; mov.u32 %0, 7; @p mov.u32 %0, 1; @!p add.u32 %0, %0, 2; }")
// Floats
OP2(add_f32, f, f, f, "add.rn.f32 %0, %1, %2;")
OP2(add_rz_f32, f, f, f, "add.rz.f32 %0, %1, %2;")
OP2(add_rp_f32, f, f, f, "add.rp.f32 %0, %1, %2;")
OP2(mul_rm_f32, f, f, f, "mul.rm.f32 %0, %1, %2;")
OP2(mul_ftz_f32, f, f, f, "mul.ftz.f32 %0, %1, %2;")
OP2(add_sat_f32, f, f, f, "add.sat.f32 %0, %1, %2;")
OP3(fma_f32, f, f, f, f, "fma.rn.f32 %0, %1, %2, %3;")
OP3(fma_rm_f32, f, f, f, f, "fma.rm.f32 %0, %1, %2, %3;")
OP3(fma_f64, d, d, d, d, "fma.rn.f64 %0, %1, %2, %3;")
OP2(min_f32, f, f, f, "min.f32 %0, %1, %2;")
OP2(max_nan_f32, f, f, f, "max.NaN.f32 %0, %1, %2;")
OP2(copysign_f32, f, f, f, "copysign.f32 %0, %1, %2;")
OP2(div_f32, f, f, f, "div.rn.f32 %0, %1, %2;")
OP1(ex2_f32, f, f, "ex2.approx.f32 %0, %1;")
OP1(lg2_f32, f, f, "lg2.approx.f32 %0, %1;")
OP1(sin_f32, f, f, "sin.approx.f32 %0, %1;")
OP1(cos_f32, f, f, "cos.approx.f32 %0, %1;")
OP1(tanh_f32, f, f, "tanh.approx.f32 %0, %1;")
OP1(rcp_f32, f, f, "rcp.rn.f32 %0, %1;")
OP1(sqrt_f32, f, f, "sqrt.rn.f32 %0, %1;")
OP1(rsqrt_f32, f, f, "rsqrt.approx.f32 %0, %1;")
OP3(fma_bf16x2, r, r, r, r, "fma.rn.bf16x2 %0, %1, %2, %3;")
OP2(add_f16x2, r, r, r, "add.f16x2 %0, %1, %2;")
OP2(mul_f16, h, h, h, "mul.f16 %0, %1, %2;")
// Conversions
OP1(cvt_f16_f32, h, f, "cvt.rn.f16.f32 %0, %1;")
OP1(cvt_bf16_f32, h, f, "cvt.rn.bf16.f32 %0, %1;")
OP1(cvt_f32_f16, f, h, "cvt.f32.f16 %0, %1;")
OP1(cvt_f32_bf16, f, h, "cvt.f32.bf16 %0, %1;")
OP2(cvt_f16x2_f32, r, f, f, "cvt.rn.f16x2.f32 %0, %1, %2;")
OP2(cvt_bf16x2_f32, r, f, f, "cvt.rn.bf16x2.f32 %0, %1, %2;")
OP2(cvt_e4m3x2_f32, h, f, f, "cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;")
OP2(cvt_e5m2x2_f32, h, f, f, "cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;")
OP1(cvt_f16x2_e4m3x2, r, h, "cvt.rn.f16x2.e4m3x2 %0, %1;")
OP1(cvt_f16x2_e5m2x2, r, h, "cvt.rn.f16x2.e5m2x2 %0, %1;")
OP1(cvt_rzi_s32_f32, r, f, "cvt.rzi.s32.f32 %0, %1;")
OP1(cvt_rni_s32_f32, r, f, "cvt.rni.s32.f32 %0, %1;")
OP1(cvt_rpi_u32_f32, r, f, "cvt.rpi.u32.f32 %0, %1;")
OP1(cvt_rzi_u64_f32, l, f, "cvt.rzi.u64.f32 %0, %1;")
OP1(cvt_rmi_f32_f32, f, f, "cvt.rmi.f32.f32 %0, %1;")
OP1(cvt_rn_f32_u64, f, l, "cvt.rn.f32.u64 %0, %1;")
OP1(cvt_rn_f32_s32, f, r, "cvt.rn.f32.s32 %0, %1;")
OP1(cvt_rn_f16_s32, h, r, "cvt.rn.f16.s32 %0, %1;")
OP1(cvt_rn_f32_f64, f, d, "cvt.rn.f32.f64 %0, %1;")
OP1(cvt_f64_f32, d, f, "cvt.f64.f32 %0, %1;")
OP1(cvt_s32_s8, r, r, "cvt.s32.s8 %0, %1;")
OP1(cvt_s64_s32, l, r, "cvt.s64.s32 %0, %1;")
OP1(cvt_u32_u16, r, r, "cvt.u32.u16 %0, %1;")
OP1(cvt_sat_u8_s32, r, r, "cvt.sat.u8.s32 %0, %1;")
OP1(cvt_sat_s8_s32, r, r, "cvt.sat.s8.s32 %0, %1;")
OP1(cvt_sat_f32_f32, f, f, "cvt.sat.f32.f32 %0, %1;")
