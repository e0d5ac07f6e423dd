// Keys and values of `affine`: x = scale * code + bias, one scale and bias a group of channels.
// Scales and biases stay out of the inner loops:
//   score  = sum over groups of scale * (codes . q) + bias * sum(q)
//   output = sum over tokens of codes * (p * scale) + p * bias

template <int D, int BITS, int GROUP, typename S>
struct Affine {
  static constexpr int ROW = D * BITS / 8, GROUPS = D / GROUP, META = GROUPS * sizeof(S), TABLES = 0;
  // A product of the tensor cores lies within one group: lanes of a quad share CHUNK channels.
  static constexpr int CHUNK = GROUP >= 64 && D % 64 == 0 ? 64 : 32;
  const char *codes, *scales, *biases;  // of the head's first token
  const char *codes_here, *scales_here, *biases_here;  // of the unit's, in shared memory

  static __host__ __device__ constexpr int bytes(int unit) { return room(unit * ROW) + 2 * room(unit * META); }

  __device__ Affine(const void* c, const void* s, const void* b, int64_t token)
      : codes(static_cast<const char*>(c) + token * ROW),
        scales(static_cast<const char*>(s) + token * META),
        biases(static_cast<const char*>(b) + token * META) {}

  __device__ void load(char*, int) {}
  __device__ void close() {}
  template <typename Keys>
  __device__ void share(const Keys&) {}

  template <int UNIT>
  __device__ void fetch(Barrier barrier, char* stage, int token, int count) const {
    barrier.copy(stage, codes + static_cast<int64_t>(token) * ROW, count * ROW);
    barrier.copy(stage + room(UNIT * ROW), scales + static_cast<int64_t>(token) * META, count * META);
    barrier.copy(stage + room(UNIT * ROW) + room(UNIT * META), biases + static_cast<int64_t>(token) * META, count * META);
  }

  template <int UNIT>
  __device__ void open(const char* stage, int token) {
    codes_here = stage + misplaced(codes + static_cast<int64_t>(token) * ROW);
    stage += room(UNIT * ROW);
    scales_here = stage + misplaced(scales + static_cast<int64_t>(token) * META);
    biases_here = stage + room(UNIT * META) + misplaced(biases + static_cast<int64_t>(token) * META);
  }

  static __device__ void numbers(const char* at, int token, float* out) {
    if constexpr (META == 4 && GROUPS == 2) {
      u32 both = *reinterpret_cast<const u32*>(at + token * META);
      const S* x = reinterpret_cast<const S*>(&both);
      out[0] = number(x[0]), out[1] = number(x[1]);
    } else {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) out[i] = number(reinterpret_cast<const S*>(at + token * META)[i]);
    }
  }
};

template <int D, int BITS, int GROUP, typename S, int NT>
struct AffineKeys : Affine<D, BITS, GROUP, S> {
  using Base = Affine<D, BITS, GROUP, S>;
  static constexpr int CHUNK = Base::CHUNK, N = CHUNK / 32, GROUPS = Base::GROUPS;
  using Pair = Pairs<BITS>;
  u32 query[NT][D / 16][2];
  float sums[NT][GROUPS][2];  // of q over a group, for the heads of columns 2t and 2t + 1

  using Base::Base;

  // q: float32 rows of D channels in shared memory, 8 * NT of them, times scale and log2(e).
  __device__ void prepare(const float* q) {
    const int g = lane_row(), t = lane_column();
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float* row = q + (n * 8 + g) * D;
#pragma unroll
      for (int s = 0; s < D / 16; ++s)
#pragma unroll
        for (int b = 0; b < 2; ++b) {  // step s takes registers 2 (s % 2) + b of an eight
          int i = 2 * (s % 2) + b, eight = s / 2, chunk = eight / N;
          int base = chunk * CHUNK + (N * t + eight % N) * 8;
          float factor = 16.0f / (1 << Pair::exponent(i));
          query[n][s][b] = half2_of(row[base + Pair::low(i)] * factor, row[base + Pair::high(i)] * factor);
        }
#pragma unroll
      for (int G = 0; G < GROUPS; ++G)
        for (int j = 0; j < 2; ++j) {
          float sum = 0;
          for (int d = g; d < GROUP; d += 8) sum += q[(n * 8 + 2 * t + j) * D + G * GROUP + d];
          sums[n][G][j] = sum_of_rows(sum);
        }
    }
  }

  __device__ void scores(int tile, int count, float (*out)[4]) const {
    const int t = lane_column();
    int token[2];
    for (int r = 0; r < 2; ++r) token[r] = min(tile * 16 + token_of_row(lane_row() + 8 * r), count - 1);
    float scale[2][GROUPS], bias[2][GROUPS];
    for (int r = 0; r < 2; ++r) {
      Base::numbers(this->scales_here, token[r], scale[r]);
      Base::numbers(this->biases_here, token[r], bias[r]);
    }
#pragma unroll
    for (int n = 0; n < NT; ++n)
      for (int i = 0; i < 4; ++i) out[n][i] = 0;
#pragma unroll
    for (int G = 0; G < GROUPS; ++G) {
      float c[NT][4] = {};
#pragma unroll
      for (int k = 0; k < GROUP / CHUNK; ++k) {
        int chunk = G * (GROUP / CHUNK) + k;
        u32 a[2][N][4];
        for (int r = 0; r < 2; ++r)
          key_codes<BITS, N>(this->codes_here + token[r] * Base::ROW, chunk * 4 + t, a[r]);
#pragma unroll
        for (int s = 0; s < 2 * N; ++s)
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            const u32* b = query[n][chunk * 2 * N + s];
            int i = 2 * (s % 2);
            mma(c[n], a[0][s / 2][i], a[1][s / 2][i], a[0][s / 2][i + 1], a[1][s / 2][i + 1], b[0], b[1]);
          }
      }
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          out[n][i] += scale[i / 2][G] * 1048576.0f * c[n][i] + bias[i / 2][G] * sums[n][G][i % 2];
    }
  }
};

template <int D, int BITS, int GROUP, typename S, int NT>
struct AffineValues : Affine<D, BITS, GROUP, S> {
  using Base = Affine<D, BITS, GROUP, S>;
  static constexpr int CHUNK = Base::CHUNK, N = CHUNK / 8, GROUPS = Base::GROUPS, PLANES = 1;
  float sum[NT][D / 16][4] = {}, biased[NT][GROUPS][2] = {};

  using Base::Base;

  __device__ void rescale(int n, const float* factor) {
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[n][i][j] *= factor[j % 2];
#pragma unroll
    for (int G = 0; G < GROUPS; ++G) biased[n][G][0] *= factor[0], biased[n][G][1] *= factor[1];
  }

  // log2 of what multiplies codes, for rows g and g + 8: weights times it stay within float16.
  __device__ void sizes(int tile, int count, float* out) const {
    for (int r = 0; r < 2; ++r) {
      float scale[GROUPS], most = 1e-6f;
      Base::numbers(this->scales_here, min(tile * 16 + token_of_row(lane_row() + 8 * r), count - 1), scale);
#pragma unroll
      for (int G = 0; G < GROUPS; ++G) most = fmaxf(most, fabsf(scale[G]));
      out[r] = log_of(most);
    }
  }

  // p: weights as `scores` lays them out; 0 for tokens from `count` on.
  __device__ void add(int tile, int count, const float (*p)[4]) {
    const int g = lane_row(), t = lane_column();
    float scale[2][GROUPS], bias[2][GROUPS];
    for (int r = 0; r < 2; ++r) {
      int token = min(tile * 16 + token_of_row(g + 8 * r), count - 1);
      Base::numbers(this->scales_here, token, scale[r]);
      Base::numbers(this->biases_here, token, bias[r]);
    }
    // Rows 2t, 2t + 1, 2t + 8 and 2t + 9; what stands behind `count` is multiplied by 0.
    const char* row[4];
    for (int k = 0; k < 4; ++k)
      row[k] = this->codes_here + (tile * 16 + token_of_row(2 * t + k % 2 + k / 2 * 8)) * Base::ROW;
#pragma unroll
    for (int G = 0; G < GROUPS; ++G) {
      u32 b[NT][2];
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        for (int r = 0; r < 2; ++r)
          b[n][r] = transposed(half2_of(p[n][2 * r] * scale[r][G], p[n][2 * r + 1] * scale[r][G]));
        for (int j = 0; j < 2; ++j) biased[n][G][j] += p[n][j] * bias[0][G] + p[n][2 + j] * bias[1][G];
      }
#pragma unroll
      for (int k = 0; k < GROUP / CHUNK; ++k) {
        int chunk = G * (GROUP / CHUNK) + k;
        u32 near[N], far[N];
        value_codes<BITS, N>(row[0], row[1], chunk * 8 + g, near);
        value_codes<BITS, N>(row[2], row[3], chunk * 8 + g, far);
#pragma unroll
        for (int i = 0; i < N / 2; ++i)
#pragma unroll
          for (int n = 0; n < NT; ++n)
            mma(sum[n][chunk * (N / 2) + i], near[2 * i], near[2 * i + 1], far[2 * i], far[2 * i + 1], b[n][0], b[n][1]);
      }
    }
  }

  // Writes the sums of the warp to out[column][stride], for the columns below `columns`.
  __device__ void finish(float* out, int stride, int columns) const {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int column = n * 8 + 2 * lane_column() + j;
        float shift[GROUPS];
        for (int G = 0; G < GROUPS; ++G) shift[G] = sum_of_rows(biased[n][G][j]);
        if (column >= columns) continue;
#pragma unroll
        for (int i = 0; i < D / 16; ++i)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            int chunk = i / (N / 2), code = 2 * (i % (N / 2)) + r, shifted = even(BITS) ? code * BITS % 8 : 0;
            out[column * stride + chunk * CHUNK + lane_row() * N + code] =
                sum[n][i][2 * r + j] * (16777216.0f / (1 << shifted)) + shift[chunk * CHUNK / GROUP];
          }
      }
  }
};
