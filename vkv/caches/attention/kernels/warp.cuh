// What the kernels ask of the hardware, in one place: tensor cores, exchanges within a warp, and
// copies into shared memory. A lane of a warp is g * 4 + t, with g in 0..7 and t in 0..3: the
// tensor cores give it rows g and g + 8 and columns 2t and 2t + 1 of a product.

using u32 = uint32_t;

constexpr float NOTHING = -1e30f;  // below every score

__device__ __forceinline__ int lane_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_column() { return threadIdx.x % 4; }

// c += A B with A (16, 16) and B (16, 8) of float16, c (16, 8) of float32.
__device__ __forceinline__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A B rounded to float16: c[0] holds row g, c[1] row g + 8.
__device__ __forceinline__ void mma_half(u32* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%8};"
      : "=r"(c[0]), "=r"(c[1])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}

// Rows of an 8 by 8 matrix of 16-bit values become columns.
__device__ __forceinline__ u32 transposed(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ u32 as_bits(__half2 x) { return *reinterpret_cast<u32*>(&x); }
__device__ __forceinline__ __half2 as_half2(u32 x) { return *reinterpret_cast<__half2*>(&x); }
__device__ __forceinline__ u32 half2_of(float low, float high) { return as_bits(__floats2half2_rn(low, high)); }
__device__ __forceinline__ float2 floats_of(u32 x) { return __half22float2(as_half2(x)); }
__device__ __forceinline__ u32 add2(u32 a, u32 b) { return as_bits(__hadd2(as_half2(a), as_half2(b))); }
__device__ __forceinline__ u32 sub2(u32 a, u32 b) { return as_bits(__hsub2(as_half2(a), as_half2(b))); }
__device__ __forceinline__ u32 mul2(u32 a, u32 b) { return as_bits(__hmul2(as_half2(a), as_half2(b))); }
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  return as_bits(__hfma2(as_half2(a), as_half2(b), as_half2(c)));
}
// Bytes of (a, b), numbered 0 to 7, one for each hexadecimal digit of `which`.
__device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 which) { return __byte_perm(a, b, which); }
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Sine and cosine of an angle of up to 2^20, which is first brought near 0.
__device__ __forceinline__ void turned_by(float angle, float* sine, float* cosine) {
  float turns = rintf(angle * 0.15915494309189535f);
  angle = fmaf(turns, -6.28125f, angle), angle = fmaf(turns, -1.9350051879882812e-3f, angle);
  angle = fmaf(turns, -3.019915979506e-7f, angle);
  __sincosf(angle, sine, cosine);
}
__device__ __forceinline__ float log_of(float x) { return __log2f(x); }

__device__ __forceinline__ u32 from_lane(u32 x, int lane) { return __shfl_sync(~0u, x, lane); }
__device__ __forceinline__ float from_lane(float x, int lane) { return __shfl_sync(~0u, x, lane); }
__device__ __forceinline__ float exchanged(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(~0u, x); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ void sync_block() { __syncthreads(); }

// What other blocks wrote.
__device__ __forceinline__ float fresh(const float* at) { return __ldcg(at); }

// Whether this block is the last of `count` to come here; what all of them wrote can then be read.
// The counter starts with 0, and ends with it. `flag` is in shared memory.
__device__ __forceinline__ bool last_of(u32 count, u32* counter, int* flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *flag = atomicInc(counter, count - 1) == count - 1;
  __syncthreads();
  __threadfence();
  return *flag;
}

__device__ __forceinline__ float sum_of_rows(float x) {
  for (int step = 4; step < 32; step *= 2) x += exchanged(x, step);
  return x;
}
__device__ __forceinline__ float max_of_rows(float x) {
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, exchanged(x, step));
  return x;
}
__device__ __forceinline__ float sum_of_warp(float x) {
  for (int step = 1; step < 32; step *= 2) x += exchanged(x, step);
  return x;
}

// Copies of one stage of a warp's ring into shared memory. On Hopper and later the copy engine
// makes them, and one lane starts them; before, the lanes of the warp do.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define VKV_COPY_ENGINE 1
#endif

struct Barrier {
  u32 address;

  __device__ explicit Barrier(uint64_t* at) : address(static_cast<u32>(__cvta_generic_to_shared(at))) {}

  __device__ void init() const {
#ifdef VKV_COPY_ENGINE
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address) : "memory");
#endif
  }

  // Starts a copy of the `size` bytes at `from`; returns where they are once `wait` is over.
  // The copy is of whole 16 bytes, so there must be room for 30 more.
  __device__ void copy(char* to, const char* from, int size) const {
    u32 before = reinterpret_cast<uintptr_t>(from) & 15;
    u32 bytes = (before + size + 15) & ~15u;
#ifdef VKV_COPY_ENGINE
    if (threadIdx.x % 32 == 0) {
      asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       static_cast<u32>(__cvta_generic_to_shared(to))),
                   "l"(from - before), "r"(bytes), "r"(address)
                   : "memory");
    }
#else
    for (u32 i = threadIdx.x % 32 * 16; i < bytes; i += 512)
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from - before + i);
#endif
  }

  // All copies of the stage were started.
  __device__ void started() const {
#ifdef VKV_COPY_ENGINE
    if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address) : "memory");
#else
    __syncwarp();
#endif
  }

  __device__ void wait(u32 parity) const {
#ifdef VKV_COPY_ENGINE
    u32 done = 0;
    while (!done)
      asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                   : "=r"(done)
                   : "r"(address), "r"(parity)
                   : "memory");
#endif
  }
};

// What this thread wrote to shared memory comes before copies that are started after a barrier.
__device__ __forceinline__ void before_copies() {
#ifdef VKV_COPY_ENGINE
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ int misplaced(const char* from) { return reinterpret_cast<uintptr_t>(from) & 15; }

__host__ __device__ constexpr int room(int size) { return (size + 31) / 16 * 16; }
