// Keys of `nsnquant`. Where keys hold their rotary embedding, H moves to the queries. Where they
// do not, codes are rotated by H and turned by the embedding here: H of four bits of the channel
// number on tensor cores, of the others by sums and differences in registers. A unit's first
// position turns the queries, the other way; so keys turn by their place within the unit only,
// whose cosines and sines stay in shared memory.

// A lane has channels of both halves, which the embedding turns into one another: channel
// (j, half, t, e), with e the lowest bit.
template <int D>
__device__ __forceinline__ int channel_of(int j, int half, int t, int e) {
  return e | (t & 1) << 1 | j << 2 | (t >> 1) * (D / 4) | half * (D / 2);
}

template <int D, int WINDOW, bool SIGNS, int UNIT_, int COPIES, int NT>
struct NsnTurnedKeys : Nsn<D, WINDOW, SIGNS, UNIT_, COPIES> {
  using Base = Nsn<D, WINDOW, SIGNS, UNIT_, COPIES>;
  static constexpr int J = D / 16, OWN = D / 32, TURN = 2 * D + 32, QUERY = D + 16;
  static constexpr int ROWS = 8 * NT * QUERY * 4, SCRATCH = 2 * D + 4 * D;
  static constexpr int TABLES = Base::BOOK + UNIT_ * TURN + ROWS + 4 * SCRATCH;
  const char* turns;         // (UNIT, D / 16, 4) of cosines and sines of two channels, float16
  const float *frequencies, *queries;
  float spacing;             // of positions
  int start;                 // position of the first token
  char *turn, *scratch;
  u32 query[NT][J][2], hadamard[2][2];

  template <typename... A>
  __device__ NsnTurnedKeys(const void* turns_, const float* frequencies_, float spacing_, int start_, A... a)
      : Base(a...), turns(static_cast<const char*>(turns_)), frequencies(frequencies_), spacing(spacing_), start(start_) {}

  __device__ void load(char* tables, int threads) {
    this->load_book(tables, threads);
    turn = tables + Base::BOOK;
    for (int i = threadIdx.x; i < UNIT_ * (D / 8); i += threads)
      *reinterpret_cast<uint4*>(turn + i / (D / 8) * TURN + i % (D / 8) * 16) = reinterpret_cast<const uint4*>(turns)[i];
    queries = reinterpret_cast<float*>(turn + UNIT_ * TURN);
    scratch = turn + UNIT_ * TURN + ROWS + threadIdx.x / 32 * SCRATCH;
    const int g = lane_row(), t = lane_column();
    for (int half = 0; half < 2; ++half)
      for (int b = 0; b < 2; ++b) {
        u32 odd = (b & g >> 1) ^ (t & g >> 2) ^ (t >> 1 & half);
        hadamard[half][b] = half2_of(odd & 1 ? -1 : 1, (odd ^ g) & 1 ? -1 : 1);
      }
  }

  __device__ void prepare(const float* q) {
    auto* to = const_cast<float*>(queries);
    for (int i = threadIdx.x; i < 8 * NT * D; i += 128) {
      int at = i % D, j = at / 16, t = at / 4 % 4, half = at / 2 % 2, e = at % 2;
      to[i / D * QUERY + at] = q[i / D * D + channel_of<D>(j, half, t, e)];
    }
  }

  template <int UNIT>
  __device__ void open(const char* stage, int token) {
    this->template open_unit<UNIT>(stage, token);
    const int lane = threadIdx.x % 32, t = lane_column();
    auto* shift = reinterpret_cast<u32*>(scratch);          // (J, 4, 2) of two channels
    auto* angle = reinterpret_cast<float*>(scratch + 2 * D);  // (J, 4, 4): two cosines, two sines
    u32 range = from_lane(this->scales, 16 + lane / 4 % (D / 32));
    sync_warp();
    if (lane < D / 8)
#pragma unroll
      for (int k = 0; k < 8; k += 2) {
        int c = lane * 8 + k, half = c / (D / 2), high = c / (D / 4) % 2, j = c / 4 % J;
        u32 two = half2_of(Base::linear(this->shifts >> 4 * k, range), Base::linear(this->shifts >> 4 * (k + 1), range));
        shift[(j * 4 + (high << 1 | (k >> 1 & 1))) * 2 + half] = two;
      }
    float position = spacing * static_cast<float>(start + token);
#pragma unroll
    for (int k = 0; k < D / 64; ++k) {
      int i = lane + 32 * k, e = i % 2, at = i / 2;  // at: j * 4 + t
      float sine, cosine;
      turned_by(position * frequencies[channel_of<D>(at / 4, 0, at % 4, e)], &sine, &cosine);
      angle[at * 4 + e] = cosine, angle[at * 4 + 2 + e] = sine;
    }
    sync_warp();
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < J; ++j) {
        const float* q = queries + (n * 8 + lane_row()) * QUERY + (j * 4 + t) * 4;
        const float* a = angle + (j * 4 + t) * 4;
        query[n][j][0] = half2_of(q[0] * a[0] + q[2] * a[2], q[1] * a[1] + q[3] * a[3]);
        query[n][j][1] = half2_of(q[2] * a[0] - q[0] * a[2], q[3] * a[1] - q[1] * a[3]);
      }
  }

  __device__ void scores(int tile, int, float (*out)[4]) const {
    const int t = lane_column();
    u32 y[J][2][2];  // [j][half][row g or g + 8]
    {
      u32 x[2][OWN][4];
      for (int r = 0; r < 2; ++r)
        this->template pieces<OWN>(tile * 16 + token_of_row(lane_row() + 8 * r), t * OWN, x[r]);
#pragma unroll
      for (int j = 0; j < J; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int i = 2 * (j % 2);
          mma_half(y[j][half], x[0][j / 2][i], x[1][j / 2][i], x[0][j / 2][i + 1], x[1][j / 2][i + 1],
                   hadamard[half][0], hadamard[half][1]);
        }
    }
#pragma unroll
    for (int step = 1; step < J; step *= 2)
#pragma unroll
      for (int j = 0; j < J; ++j)
        if (!(j & step))
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            u32 low = y[j][k / 2][k % 2], high = y[j + step][k / 2][k % 2];
            y[j][k / 2][k % 2] = add2(low, high), y[j + step][k / 2][k % 2] = sub2(low, high);
          }
    float first[2], c[NT][4] = {};
    this->first_scales(tile, first);
    u32 second[2];
    for (int r = 0; r < 2; ++r) {
      float s = this->second_scale(tile, r) * rsqrtf(static_cast<float>(D));
      second[r] = half2_of(s, s);
    }
#pragma unroll
    for (int j = 0; j < J; ++j) {
      uint2 o = reinterpret_cast<const uint2*>(scratch)[j * 4 + t];
      u32 x[2][2];  // [half][row]
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int token = tile * 16 + token_of_row(lane_row() + 8 * r);
        uint2 cs = *reinterpret_cast<const uint2*>(turn + token * TURN + (j * 4 + t) * 8);
        u32 low = fma2(y[j][0][r], second[r], o.x), high = fma2(y[j][1][r], second[r], o.y);
        x[0][r] = fma2(high, cs.y ^ 0x80008000u, mul2(low, cs.x)), x[1][r] = fma2(low, cs.y, mul2(high, cs.x));
      }
#pragma unroll
      for (int n = 0; n < NT; ++n) mma(c[n], x[0][0], x[0][1], x[1][0], x[1][1], query[n][j][0], query[n][j][1]);
    }
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int k = 0; k < 4; ++k) out[n][k] = first[k / 2] * c[n][k];
  }
};

template <int D, int WINDOW, bool SIGNS, int UNIT_, int COPIES, int NT>
struct NsnKeys : Nsn<D, WINDOW, SIGNS, UNIT_, COPIES> {
  using Base = Nsn<D, WINDOW, SIGNS, UNIT_, COPIES>;
  static constexpr int OWN = D / 32, TABLES = Base::BOOK + 8 * NT * D * 4;
  u32 query[NT][D / 16][2];
  float* plain;  // the queries, in shared memory
  float along[NT][2];  // q . o, of columns 2t and 2t + 1

  using Base::Base;

  __device__ void load(char* tables, int threads) {
    this->load_book(tables, threads);
    plain = reinterpret_cast<float*>(tables + Base::BOOK);
  }

  // Leaves q rotated.
  __device__ void prepare(float* q) {
    for (int i = threadIdx.x; i < 8 * NT * D; i += 128) plain[i] = q[i];
    for (int step = 1; step < D; step *= 2) {
      sync_block();
      for (int i = threadIdx.x; i < 4 * NT * D; i += 128) {
        int at = i / step * 2 * step + i % step;
        float low = q[at], high = q[at + step];
        q[at] = low + high, q[at + step] = low - high;
      }
    }
    sync_block();
    const float norm = rsqrtf(static_cast<float>(D));
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {  // register i of the lane's pieces
        const float* at = q + (n * 8 + lane_row()) * D + 8 * (lane_column() * OWN) + 2 * i;
        query[n][i / 2][i % 2] = half2_of(at[0] * norm, at[1] * norm);
      }
  }

  template <int UNIT>
  __device__ void open(const char* stage, int token) {
    this->template open_unit<UNIT>(stage, token);
    const int lane = threadIdx.x % 32;
    u32 range = from_lane(this->scales, 16 + lane / 4 % (D / 32));
    float o[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) o[k] = lane < D / 8 ? Base::linear(this->shifts >> 4 * k, range) : 0;
#pragma unroll
    for (int c = 0; c < 8 * NT; ++c) {
      float dot = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) dot += o[k] * plain[c * D + lane % (D / 8) * 8 + k];
      dot = sum_of_warp(dot);
      if (c % 8 / 2 == lane_column()) along[c / 8][c % 2] = dot;
    }
  }

  __device__ void scores(int tile, int, float (*out)[4]) const {
    u32 x[2][OWN][4];
    for (int r = 0; r < 2; ++r)
      this->template pieces<OWN>(tile * 16 + token_of_row(lane_row() + 8 * r), lane_column() * OWN, x[r]);
    float first[2], c[NT][4] = {};
    this->first_scales(tile, first);
#pragma unroll
    for (int s = 0; s < D / 16; ++s)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        int i = 2 * (s % 2);
        mma(c[n], x[0][s / 2][i], x[1][s / 2][i], x[0][s / 2][i + 1], x[1][s / 2][i + 1], query[n][s][0], query[n][s][1]);
      }
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        out[n][k] = first[k / 2] * (this->second_scale(tile, k / 2) * c[n][k] + along[n][k % 2]);
  }
};
