// kvquant: codes of a piece are BITS bytes; outliers are found in the list a chunk at a time.

constexpr int CHUNK = 256;  // gaps of a chunk, and threads of a block

// Inclusive sums over the threads of a block of CHUNK; `total` gets that of all.
__device__ inline uint32_t scan(uint32_t x, uint32_t* total) {
  __shared__ uint32_t warps[CHUNK / 32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    uint32_t before = __shfl_up_sync(0xffffffff, x, step);
    if (lane >= step) x += before;
  }
  __syncthreads();  // the sums of the scan before this one were read
  if (lane == 31) warps[warp] = x;
  __syncthreads();
  uint32_t all = 0;
  for (int i = 0; i < CHUNK / 32; ++i) {
    if (i < warp) x += warps[i];
    all += warps[i];
  }
  *total = all;
  return x;
}

// Elements that gap `i` passes, low 20 bits, and whether it names one, above them.
__device__ inline uint32_t passed(const uint8_t* gaps, int count, int i) {
  if (i >= count) return 0;
  uint32_t gap = gaps[i], real = gap != 255;
  return gap + real + (real << 20);
}

// Of each chunk: elements and outliers. sums: (2, chunks).
__device__ inline void gap_sums(const uint8_t* gaps, int count, int chunks, int* sums) {
  uint32_t total;
  scan(passed(gaps, count, blockIdx.x * CHUNK + threadIdx.x), &total);
  if (threadIdx.x == 0) sums[blockIdx.x] = total & 0xfffff, sums[chunks + blockIdx.x] = total >> 20;
}

// starts: (2, chunks), elements and outliers before each chunk.
struct Outliers {
  const uint8_t* gaps;
  const int* starts;
  const __half* values;
  int count, chunks;

  // Put those among elements `low` to `high - 1`, in token order, where they belong in a tile
  // whose slot `slot` starts with element `low`; a token has `wide` elements.
  template <typename T, int D>
  __device__ void put(T* tile, int slot, int wide, int64_t low, int64_t high) const {
    int chunk = 0;
    for (int step = chunks; step > 1;) {  // a thread for each part, until parts are chunks
      int end = min(chunk + step, chunks);
      step = (step + CHUNK - 1) / CHUNK;
      int i = chunk + threadIdx.x * step;
      chunk += (__syncthreads_count(i < end && starts[i] <= low) - 1) * step;
    }
    for (; chunk < chunks && starts[chunk] < high; ++chunk) {
      int i = chunk * CHUNK + threadIdx.x;
      uint32_t own = passed(gaps, count, i), total, sum = scan(own, &total);
      int64_t element = static_cast<int64_t>(starts[chunk]) + (sum & 0xfffff) - 1;
      bool real = i < count - 1 && own >> 20;  // the last one is the end
      if (!real || element < low || element >= high) continue;
      int at = slot * wide + static_cast<int>(element - low), channel = at % D;
      int moved = place<D / 8>(channel / 8, at / wide) * 8 + channel % 8;
      tile[at - channel + moved] = static_cast<T>(__half2float(values[starts[chunks + chunk] + (sum >> 20) - 1]));
    }
  }
};

// TABLE: 0 channel, 1 token, 2 shared.
template <typename T, int D, int BITS, int TABLE>
struct Kv {
  static constexpr int L = 1 << BITS, P = D / 8, WORDS = (D * BITS + 31) / 32;
  const uint32_t* codes;
  const __half* levels;
  const uint8_t* scales;
  const int8_t* offsets;

  // Levels of a channel lie a row apart, and every 64 channels are moved by 4, so that threads
  // do not meet in one bank.
  static constexpr int WIDE = D + (D + 63) / 64 * 4;
  static __device__ int where(int64_t row, int channel, int level) {
    return (row * L + level) * WIDE + channel + channel / 64 * 4;
  }

  __device__ void load(T* table, int rows) const {
    if (TABLE == 0)
      for (int i = threadIdx.x; i < rows * D * L; i += blockDim.x)
        table[where(i / (D * L), i / L % D, i % L)] = static_cast<T>(__half2float(levels[i]));
  }

  __device__ Piece<T> piece(const T* table, Span span, int64_t row, int token, int piece) const {
    int64_t at = row * span.coded + token;
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(codes + at * WORDS) + piece * BITS;
    uint32_t stream = 0;
    for (int i = 0; i < BITS; ++i) stream |= static_cast<uint32_t>(bytes[i]) << 8 * i;
    float scale = 0, offset = 0;
    if (TABLE == 2) {
      if (scales[at]) scale = __uint_as_float((scales[at] + 896u) << 20);
      offset = static_cast<float>(offsets[at]) * (1.0f / 64);
    }
    Piece<T> out;
    for (int j = 0; j < 8; ++j) {
      int code = stream >> j * BITS & (L - 1);
      if (TABLE == 0) {
        out.v[j] = table[where(row, piece * 8 + j, code)];
      } else if (TABLE == 1) {
        out.v[j] = static_cast<T>(__half2float(levels[at * L + code]));
      } else {
        float x = __fmul_rn(scale, __fadd_rn(__half2float(levels[code]), offset));
        out.v[j] = static_cast<T>(fminf(fmaxf(x, -65504.0f), 65504.0f));
      }
    }
    return out;
  }
};

template <typename T, int D, int TOKENS, int BITS, int TABLE, bool SPARSE, int ROPE, int DIMS, bool FREQS>
__device__ void kv_decode(
    Kv<T, D, BITS, TABLE> parts, Outliers outliers, Span span, const T* head, const T* tail,
    const float* turn, const float* freqs, T* out) {
  extern __shared__ __align__(16) char memory[];
  constexpr int P = D / 8;
  auto* tile = reinterpret_cast<Piece<T>*>(memory);
  auto* table = reinterpret_cast<T*>(tile + TOKENS * span.rows * P);
  const int64_t wide = static_cast<int64_t>(span.rows) * D;
  parts.load(table, span.rows);
  __syncthreads();
  for (int64_t start = static_cast<int64_t>(blockIdx.x) * TOKENS; start < span.total();
       start += static_cast<int64_t>(gridDim.x) * TOKENS) {
    for (int item = threadIdx.x; item < TOKENS * span.rows * P; item += blockDim.x) {
      int slot = item / P % TOKENS, row = item / (P * TOKENS), token = start + slot;
      if (span.holds(token))
        tile[(slot * span.rows + row) * P + place<P>(item % P, slot)] =
            parts.piece(table, span, row, token - span.head, item % P);
    }
    __syncthreads();
    if (SPARSE) {
      int64_t low = max(start - span.head, static_cast<int64_t>(0));
      int64_t high = min(start + TOKENS - span.head, static_cast<int64_t>(span.coded));
      int slot = low + span.head - start;
      if (low < high)
        outliers.put<T, D>(reinterpret_cast<T*>(tile), slot, wide, low * wide, high * wide);
      __syncthreads();
    }
    store<T, D, TOKENS, ROPE, DIMS, FREQS>(tile, span, start, head, tail, turn, freqs, out);
    __syncthreads();
  }
}
