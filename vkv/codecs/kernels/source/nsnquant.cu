// nsnquant: lookup, signs, rotation, scales. A thread holds up to 64 channels of a token, so
// that most of the rotation happens in its registers.

template <int N>
struct alignas(N) Bytes {
  uint8_t v[N];
};

template <typename T, int D, int WINDOW, bool SIGNS, bool FINE, bool CLIP>
struct Nsn {
  static constexpr int P = D / 8, OWN = P < 8 ? P : 8, LANES = P / OWN;  // pieces, of a thread
  const __half *codebook, *s2, *s1_range, *o_range;
  const uint8_t *indices, *signs;
  const void *s1, *o;

  // Windows that TOKENS neighbours can be in.
  static __device__ constexpr int windows(int tokens) { return (tokens + WINDOW - 2) / WINDOW + 1; }

  static __device__ float linear(uint32_t code, const __half* range) {
    float step = __fmul_rn(__half2float(range[0]), static_cast<float>(code & 15));
    return __fadd_rn(step, __half2float(range[1]));
  }

  // A window's row of 4-bit codes ends with its last word.
  __device__ float first(int64_t window, int token) const {
    if (FINE) return __half2float(static_cast<const __half*>(s1)[window * WINDOW + token]);
    uint32_t word = static_cast<const uint32_t*>(s1)[window * ((WINDOW + 7) / 8) + token / 8];
    return linear(word >> 4 * (token % 8), s1_range + 2 * window);
  }

  // o of the windows from that of `token` on, for all rows: shifts[row][window][D].
  template <int TOKENS>
  __device__ void shift(float* shifts, Span span, int token) const {
    constexpr int W = windows(TOKENS);
    const int count = span.coded / WINDOW;
    for (int i = threadIdx.x; i < span.rows * W * D; i += blockDim.x) {
      int row = i / (W * D), channel = i % D;
      int64_t window = static_cast<int64_t>(row) * count + min(token / WINDOW + i / D % W, count - 1);
      int64_t at = window * D + channel;
      if (FINE)
        shifts[i] = __half2float(static_cast<const __half*>(o)[at]);
      else
        shifts[i] = linear(static_cast<const uint32_t*>(o)[at / 8] >> 4 * (channel % 8), o_range + at / 32 * 2);
    }
  }

  // What a thread reads of a token: its indices and sign bytes at once, and the scales.
  struct Own {
    Bytes<OWN> index, negative;
    float first, second;
  };

  __device__ Own load(Span span, int row, int token, int lane) const {
    int64_t at = static_cast<int64_t>(row) * span.coded + token;
    int64_t window = static_cast<int64_t>(row) * (span.coded / WINDOW) + token / WINDOW;
    Own own;
    own.index = reinterpret_cast<const Bytes<OWN>*>(indices)[at * LANES + lane];
    if (SIGNS) own.negative = reinterpret_cast<const Bytes<OWN>*>(signs)[at * LANES + lane];
    own.first = first(window, token % WINDOW), own.second = __half2float(s2[at]);
    return own;
  }

  // The thread's pieces of a token; every thread of the warp must come here.
  static __device__ void lookup(float (*x)[8], const Piece<__half>* book, const Own& own, int lane) {
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
      Piece<__half> code = book[own.index.v[k]];
      uint32_t negative = SIGNS ? own.negative.v[k] : 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        uint32_t bits = __float_as_uint(__half2float(code.v[j]));
        x[k][j] = __uint_as_float(SIGNS ? bits ^ (negative << (31 - j) & 0x80000000u) : bits);
      }
    }
    rotate(x, lane);
  }

  static __device__ void rotate(float (*x)[8], int lane) {
#pragma unroll
    for (int step = 1; step < 8 * OWN; step *= 2)
#pragma unroll
      for (int i = 0; i < 8 * OWN; ++i)
        if (!(i & step)) {
          int other = i + step;
          float low = x[i / 8][i % 8], high = x[other / 8][other % 8];
          x[i / 8][i % 8] = low + high, x[other / 8][other % 8] = low - high;
        }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
#pragma unroll
      for (int i = 0; i < 8 * OWN; ++i) {
        float own = x[i / 8][i % 8], other = __shfl_xor_sync(0xffffffff, own, step);
        x[i / 8][i % 8] = lane & step ? other - own : own + other;
      }
  }

  // Tables are loaded behind the first reads of codes, so that both wait together.
  template <int TOKENS>
  __device__ void fill(Piece<T>* tile, Piece<__half>* book, float* shifts, int size, Span span, int start) const {
    constexpr float norm = D == 32 ? 0.17677669529663689 : D == 64 ? 0.125 : D == 128 ? 0.08838834764831845 : 0.0625;
    const int items = TOKENS * span.rows * LANES, before = max(start - span.head, 0);
    for (int base = 0; base < items; base += blockDim.x) {
      int item = min(base + static_cast<int>(threadIdx.x), items - LANES + static_cast<int>(threadIdx.x) % LANES);
      int lane = item % LANES, slot = item / LANES % TOKENS, row = item / (LANES * TOKENS);
      int token = min(max(start + slot - span.head, 0), span.coded - 1);
      Own own = load(span, row, token, lane);
      if (base == 0) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x)
          book[i] = reinterpret_cast<const Piece<__half>*>(codebook)[min(i, size - 1)];
        shift<TOKENS>(shifts, span, before);
        __syncthreads();
      }
      float x[OWN][8];
      lookup(x, book, own, lane);
      const float* o = shifts + ((row * windows(TOKENS)) + token / WINDOW - before / WINDOW) * D;
#pragma unroll
      for (int k = 0; k < OWN; ++k) {
        int piece = lane * OWN + k;
        Piece<T> out;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float h = __fmul_rn(x[k][j], norm);
          float y = __fmul_rn(own.first, __fadd_rn(__fmul_rn(own.second, h), o[piece * 8 + j]));
          if (CLIP) y = fminf(fmaxf(y, -65504.0f), 65504.0f);
          out.v[j] = static_cast<T>(y);
        }
        tile[(slot * span.rows + row) * P + place<P>(piece, slot)] = out;
      }
    }
  }
};

template <typename Parts, typename T, int D, int TOKENS, int ROPE, int DIMS, bool FREQS>
__device__ void nsn_decode(
    Parts parts, int size, Span span, const T* head, const T* tail, const float* turn,
    const float* freqs, T* out) {
  extern __shared__ __align__(16) char memory[];
  auto* book = reinterpret_cast<Piece<__half>*>(memory);
  auto* shifts = reinterpret_cast<float*>(book + 256);
  auto* tile = reinterpret_cast<Piece<T>*>(shifts + span.rows * Parts::windows(TOKENS) * D);
  const int start = blockIdx.x * TOKENS;
  parts.template fill<TOKENS>(tile, book, shifts, size, span, start);
  __syncthreads();
  store<T, D, TOKENS, ROPE, DIMS, FREQS>(tile, span, start, head, tail, turn, freqs, out);
}
