// Packed codes as float16 numbers. A code of up to 8 bits in the low bits of a float16 is the
// subnormal number code * 2^-24, which tensor cores multiply exactly: unpacking is a shift and a
// mask for two codes. A code that stays e bits higher counts 2^e times as much.

// Codes that share bytes evenly have a fixed place in every byte.
__host__ __device__ constexpr bool even(int bits) { return bits == 2 || bits == 4 || bits == 8; }

// Code i of both 16-bit halves of x.
template <int BITS>
__device__ __forceinline__ u32 field(u32 x, int i) {
  u32 mask = ((1u << BITS) - 1) << i * BITS % 8;
  return (i * BITS >= 8 ? x >> 8 : x) & (mask | mask << 16);
}

// Bits of codes from bit `at` of the words at `p`; at most 48 of them count.
__device__ __forceinline__ uint64_t stream(const char* p, int at) {
  auto words = reinterpret_cast<const u32*>(p + at / 32 * 4);
  return (words[0] | static_cast<uint64_t>(words[1]) << 32) >> at % 32;
}

// Keys: eight codes of a token make four registers; register i holds these two of the eight,
// counted 2^exponent times.
template <int BITS>
struct Pairs {
  static __host__ __device__ constexpr int low(int i) { return !even(BITS) ? 2 * i : BITS == 8 ? i + i / 2 * 2 : i; }
  static __host__ __device__ constexpr int high(int i) {
    return !even(BITS) ? 2 * i + 1 : BITS == 8 ? low(i) + 2 : i + 4;
  }
  static __host__ __device__ constexpr int exponent(int i) { return even(BITS) ? i * BITS % 8 : 0; }
};

// N times eight codes from byte N * index * BITS of the row on.
template <int BITS, int N>
__device__ __forceinline__ void key_codes(const char* row, int index, u32 (*out)[4]) {
  const char* p = row + N * index * BITS;
  if constexpr (BITS == 8) {
    u32 x[2 * N];
    if constexpr (N == 2)
      *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(p);
    else
      *reinterpret_cast<uint2*>(x) = *reinterpret_cast<const uint2*>(p);
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) out[i / 4][i % 4] = field<8>(x[i / 2], i % 2);
  } else if constexpr (BITS == 4) {
    u32 x[N];
    if constexpr (N == 2)
      *reinterpret_cast<uint2*>(x) = *reinterpret_cast<const uint2*>(p);
    else
      x[0] = *reinterpret_cast<const u32*>(p);
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) out[i / 4][i % 4] = field<4>(x[i / 4], i % 4);
  } else if constexpr (BITS == 2) {
    u32 x = N == 2 ? *reinterpret_cast<const u32*>(p) : *reinterpret_cast<const uint16_t*>(p);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      u32 spread = bytes_of(x, 0, n ? 0x4342 : 0x4140);
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = field<2>(spread, i);
    }
  } else {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      uint64_t x = stream(row, (N * index + n) * 8 * BITS);
      constexpr u32 mask = (1u << BITS) - 1;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        out[n][i] = (static_cast<u32>(x >> 2 * i * BITS) & mask) | (static_cast<u32>(x >> (2 * i + 1) * BITS) & mask) << 16;
    }
  }
}

// Values: N codes (4 or 8) of two tokens, from code N * index of the rows on. Register i holds
// code i of both, counted 2^(i * BITS % 8) times where codes are even.
template <int BITS, int N>
__device__ __forceinline__ void value_codes(const char* first, const char* second, int index, u32* out) {
  const int at = N * index * BITS;  // in bits
  if constexpr (even(BITS)) {
    constexpr int BYTES = N * BITS / 8, EACH = 16 / BITS;
    u32 x[2], y[2];
    const char *p = first + at / 8, *q = second + at / 8;
    if constexpr (BYTES == 8) {
      *reinterpret_cast<uint2*>(x) = *reinterpret_cast<const uint2*>(p);
      *reinterpret_cast<uint2*>(y) = *reinterpret_cast<const uint2*>(q);
    } else if constexpr (BYTES == 4) {
      x[0] = *reinterpret_cast<const u32*>(p), y[0] = *reinterpret_cast<const u32*>(q);
    } else if constexpr (BYTES == 2) {
      x[0] = *reinterpret_cast<const uint16_t*>(p), y[0] = *reinterpret_cast<const uint16_t*>(q);
    } else {
      x[0] = *reinterpret_cast<const uint8_t*>(p), y[0] = *reinterpret_cast<const uint8_t*>(q);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      int half = i / EACH;  // which 16 bits
      u32 both = bytes_of(x[half / 2], y[half / 2], half % 2 ? 0x7632 : 0x5410);
      out[i] = field<BITS>(both, i % EACH);
    }
  } else {
    uint64_t x = stream(first, at), y = stream(second, at);
    constexpr u32 mask = (1u << BITS) - 1;
#pragma unroll
    for (int i = 0; i < N; ++i)
      out[i] = (static_cast<u32>(x >> i * BITS) & mask) | (static_cast<u32>(y >> i * BITS) & mask) << 16;
  }
}

__device__ __forceinline__ float number(float x) { return x; }
__device__ __forceinline__ float number(__half x) { return __half2float(x); }
__device__ __forceinline__ float number(__nv_bfloat16 x) { return __bfloat162float(x); }

// Row of a score tile -> its token. With SPREAD, a constant of the kernel, lanes which read rows of
// `affine` together find neighbouring tokens, and fewer of them one bank of shared memory.
__device__ __forceinline__ int token_of_row(int row) {
  return SPREAD ? row % 8 / 2 + row % 2 * 4 + row / 8 * 8 : row;
}
