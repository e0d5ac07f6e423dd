// Keys and values of `nsnquant` with 4-bit metadata: x = s1 * (s2 * H code + o), where H is the
// normalized Hadamard transform, and s1 and o belong to a window of tokens.

// COPIES: of the codebook, so that lanes which look up codewords together do not meet in one bank.
template <int D, int WINDOW, bool SIGNS, int UNIT_, int COPIES>
struct Nsn {
  static constexpr int ROW = D / 8, WORDS = WINDOW / 8, BOOK = 4096 * COPIES;
  const uint8_t *indices, *signs;
  const __half *s2, *codebook;
  const u32 *s1, *s1_range, *o, *o_range;  // of the head's first window; a range is two float16
  int rows, tokens;                        // of the codebook; of the head
  const char *indices_here, *signs_here, *s2_here;
  const uint4* book;
  // Lanes 0 to 7: words of s1. Lane 8: its range. Lanes 16 on: ranges of o. And words of o.
  u32 scales, shifts, next_scales, next_shifts;
  int next = -1;

  static __host__ __device__ constexpr int bytes(int unit) { return (1 + SIGNS) * room(unit * ROW) + room(unit * 2); }

  __device__ Nsn(const void* i, const void* sign, const void* s2_, const void* s1_, const void* o_, const void* s1_range_,
                 const void* o_range_, const void* book_, int rows_, int64_t row, int tokens_)
      : indices(static_cast<const uint8_t*>(i) + row * tokens_ * ROW),
        signs(static_cast<const uint8_t*>(sign) + row * tokens_ * ROW),
        s2(static_cast<const __half*>(s2_) + row * tokens_),
        codebook(static_cast<const __half*>(book_)),
        s1(static_cast<const u32*>(s1_) + row * (tokens_ / WINDOW) * WORDS),
        s1_range(static_cast<const u32*>(s1_range_) + row * (tokens_ / WINDOW)),
        o(static_cast<const u32*>(o_) + row * (tokens_ / WINDOW) * (D / 8)),
        o_range(static_cast<const u32*>(o_range_) + row * (tokens_ / WINDOW) * (D / 32)),
        rows(rows_), tokens(tokens_) {}

  __device__ void close() {}

  __device__ void load_book(char* tables, int threads) {
    auto* to = reinterpret_cast<uint4*>(tables);
    for (int i = threadIdx.x; i < 256 * COPIES; i += threads)
      to[i] = reinterpret_cast<const uint4*>(codebook)[min(i / COPIES, rows - 1)];
    book = to + threadIdx.x % COPIES;
  }

  template <int UNIT>
  __device__ void fetch(Barrier barrier, char* stage, int token, int count) const {
    barrier.copy(stage, reinterpret_cast<const char*>(indices) + static_cast<int64_t>(token) * ROW, count * ROW);
    stage += room(UNIT * ROW);
    if (SIGNS) {
      barrier.copy(stage, reinterpret_cast<const char*>(signs) + static_cast<int64_t>(token) * ROW, count * ROW);
      stage += room(UNIT * ROW);
    }
    barrier.copy(stage, reinterpret_cast<const char*>(s2 + token), count * 2);
  }

  __device__ void metadata(int token) {
    const int lane = threadIdx.x % 32, window = token / WINDOW;
    const u32* at = s1 + window * WORDS + token % WINDOW / 8 + lane;
    if (lane == 8) at = s1_range + window;
    if (lane >= 16) at = o_range + window * (D / 32) + lane - 16;
    if (lane < min(UNIT_ / 8, 8) || lane == 8 || (lane >= 16 && lane < 16 + D / 32)) next_scales = *at;
    if (lane < D / 8) next_shifts = o[window * (D / 8) + lane];
    next = token;
  }

  template <int UNIT>
  __device__ void open_unit(const char* stage, int token) {
    if (next != token) metadata(token);
    scales = next_scales, shifts = next_shifts;
    metadata(min(token + UNIT, tokens - UNIT));
    indices_here = stage + misplaced(reinterpret_cast<const char*>(indices) + static_cast<int64_t>(token) * ROW);
    stage += room(UNIT * ROW);
    signs_here = stage + misplaced(reinterpret_cast<const char*>(signs) + static_cast<int64_t>(token) * ROW);
    if (SIGNS) stage += room(UNIT * ROW);
    s2_here = stage + misplaced(reinterpret_cast<const char*>(s2 + token));
  }

  static __device__ float linear(u32 code, u32 range) {
    float2 r = floats_of(range);
    return r.x * static_cast<float>(code & 15) + r.y;
  }

  // s1 of the tokens of rows g and g + 8 of a tile.
  __device__ void first_scales(int tile, float* out) const {
    u32 range = from_lane(scales, 8);
    for (int r = 0; r < 2; ++r)
      out[r] = linear(from_lane(scales, 2 * tile + r) >> 4 * token_of_row(lane_row()), range);
  }

  __device__ float second_scale(int tile, int r) const {
    int token = tile * 16 + token_of_row(lane_row() + 8 * r);
    return __half2float(reinterpret_cast<const __half*>(s2_here)[token]);
  }

  // Eight channels as four registers of two; `sign`: a byte, a bit set where negative.
  __device__ void piece(u32 index, u32 sign, u32* out) const {
    uint4 x = book[(index & 255) * COPIES];
    out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
    if (SIGNS) {
      u32 twice = (sign & 255) * 0x8001u;
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] ^= twice << (15 - 2 * i) & 0x80008000u;
    }
  }

  // COUNT bytes at `p`, a word for each four.
  template <int COUNT>
  static __device__ void take(const char* p, u32* out) {
    if constexpr (COUNT == 1) out[0] = *reinterpret_cast<const uint8_t*>(p);
    if constexpr (COUNT == 2) out[0] = *reinterpret_cast<const uint16_t*>(p);
    if constexpr (COUNT == 4) out[0] = *reinterpret_cast<const u32*>(p);
    if constexpr (COUNT == 8) {
      uint2 x = *reinterpret_cast<const uint2*>(p);
      out[0] = x.x, out[1] = x.y;
    }
  }

  // COUNT neighbouring pieces of a token.
  template <int COUNT>
  __device__ void pieces(int token, int from, u32 (*out)[4]) const {
    u32 index[(COUNT + 3) / 4], sign[(COUNT + 3) / 4] = {};
    take<COUNT>(indices_here + token * ROW + from, index);
    if (SIGNS) take<COUNT>(signs_here + token * ROW + from, sign);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) piece(index[i / 4] >> 8 * (i % 4), sign[i / 4] >> 8 * (i % 4), out[i]);
  }
};

// SHARE: the codebook is that of the keys.
template <int D, int WINDOW, bool SIGNS, int UNIT_, int COPIES, int NT, bool SHARE>
struct NsnValues : Nsn<D, WINDOW, SIGNS, UNIT_, COPIES> {
  using Base = Nsn<D, WINDOW, SIGNS, UNIT_, COPIES>;
  static constexpr int PLANES = 2, TABLES = SHARE ? 0 : Base::BOOK, OWN = D / 64;  // pieces of a lane's rows
  float sum[NT][D / 16][4] = {};    // of codes, still to be rotated
  float plain[NT][D / 16][4] = {};  // of shifts
  float weight[NT][2] = {};         // of the unit's tokens, times s1

  using Base::Base;

  __device__ void load(char* tables, int threads) {
    if (!SHARE) this->load_book(tables, threads);
  }
  template <typename Keys>
  __device__ void share(const Keys& keys) {
    if constexpr (SHARE) this->book = keys.book;
  }

  template <int UNIT>
  __device__ void open(const char* stage, int token) {
    this->template open_unit<UNIT>(stage, token);
  }

  __device__ void rescale(int n, const float* factor) {
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[n][i][j] *= factor[j % 2], plain[n][i][j] *= factor[j % 2];
    weight[n][0] *= factor[0], weight[n][1] *= factor[1];
  }

  __device__ void sizes(int tile, int, float* out) const {
    this->first_scales(tile, out);
    for (int r = 0; r < 2; ++r) out[r] = log_of(fmaxf(fabsf(out[r] * this->second_scale(tile, r)), 1e-6f));
  }

  __device__ void add(int tile, int, const float (*p)[4]) {
    float scale[2];
    u32 b[NT][2];
    this->first_scales(tile, scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float second = this->second_scale(tile, r);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float low = p[n][2 * r] * scale[r], high = p[n][2 * r + 1] * scale[r];
        weight[n][0] += low, weight[n][1] += high;
        b[n][r] = transposed(half2_of(low * second, high * second));
      }
    }
    u32 x[4][OWN][4];  // of the tokens of rows 2t, 2t + 1, 2t + 8 and 2t + 9
#pragma unroll
    for (int k = 0; k < 4; ++k)
      this->template pieces<OWN>(tile * 16 + token_of_row(2 * lane_column() + k % 2 + k / 2 * 8), lane_row() * OWN, x[k]);
#pragma unroll
    for (int i = 0; i < 4 * OWN; ++i) {
      u32 a[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        a[k] = bytes_of(x[k / 2 * 2][i / 4][i % 4], x[k / 2 * 2 + 1][i / 4][i % 4], k % 2 ? 0x7632 : 0x5410);
#pragma unroll
      for (int n = 0; n < NT; ++n) mma(sum[n][i], a[0], a[1], a[2], a[3], b[n][0], b[n][1]);
    }
  }

  __device__ void close() {
    const int g = lane_row();
#pragma unroll
    for (int n = 0; n < NT; ++n) weight[n][0] = sum_of_rows(weight[n][0]), weight[n][1] = sum_of_rows(weight[n][1]);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      u32 word = from_lane(this->shifts, g * OWN + i), range = from_lane(this->scales, 16 + (g * OWN + i) / 4);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        float o = Base::linear(word >> 4 * k, range);
#pragma unroll
        for (int n = 0; n < NT; ++n)
          for (int j = 0; j < 2; ++j) plain[n][4 * i + k / 2][k % 2 * 2 + j] += weight[n][j] * o;
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) weight[n][0] = weight[n][1] = 0;
  }

  __device__ void finish(float* out, int stride, int columns) const {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < D / 16; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          int column = n * 8 + 2 * lane_column() + k % 2;
          int channel = 8 * (lane_row() * OWN + i / 4) + 2 * (i % 4) + k / 2;
          if (column >= columns) continue;
          out[column * stride + channel] = plain[n][i][k], out[column * stride + D + channel] = sum[n][i][k];
        }
  }
};
