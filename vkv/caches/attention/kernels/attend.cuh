// Attention of a few queries on a past of codes and exact tokens.
//
// The queries of one KV head (its query heads times the new tokens) are the columns of the
// products, 8 * NT of them a block. Blocks share the past: each takes a stretch of the codes,
// or a few exact tokens, and leaves (output, maximum, sum) of its stretch. The last one adds up.

// Maxima, and sums of weights, of columns 2t and 2t + 1.
template <int NT>
struct Softmax {
  float top[NT][2], sum[NT][2];

  __device__ Softmax() {
    for (int n = 0; n < NT; ++n)
      for (int j = 0; j < 2; ++j) top[n][j] = NOTHING, sum[n][j] = 0;
  }

  // Scores of TILES tiles become weights.
  template <int TILES, typename Values>
  __device__ void weigh(float (*score)[NT][4], const float (*size)[2], Values& values) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      float most[2], factor[2];
      for (int j = 0; j < 2; ++j) {
        most[j] = NOTHING;
#pragma unroll
        for (int i = 0; i < TILES; ++i)
          most[j] = fmaxf(most[j], fmaxf(score[i][n][j] + size[i][0], score[i][n][2 + j] + size[i][1]));
        most[j] = max_of_rows(most[j]);
      }
      if (any_lane(most[0] > top[n][0] || most[1] > top[n][1])) {
        for (int j = 0; j < 2; ++j) {
          float now = fmaxf(top[n][j], most[j]);
          factor[j] = power_of_two(top[n][j] - now), top[n][j] = now, sum[n][j] *= factor[j];
        }
        values.rescale(n, factor);
      }
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          score[i][n][k] = power_of_two(score[i][n][k] - top[n][k % 2]);
          sum[n][k % 2] += score[i][n][k];
        }
    }
  }
};

// Stages of a warp in shared memory, each with the codes of one unit of tokens.
template <int UNIT, int STAGES, typename Keys, typename Values>
struct Ring {
  static constexpr int SIZE = Keys::bytes(UNIT) + Values::bytes(UNIT);
  char* memory;
  uint64_t* barriers;
  int tokens, first, last;  // units

  __device__ void start(const Keys& keys, const Values& values) const {
    if (threadIdx.x % 32 < STAGES) Barrier(barriers + threadIdx.x % 32).init();
    before_copies();
    sync_warp();
    for (int unit = first; unit < min(last, first + STAGES - 1); ++unit) fetch(keys, values, unit);
  }

  __device__ int count(int unit) const { return min(UNIT, tokens - unit * UNIT); }
  __device__ char* stage(int unit) const { return memory + (unit - first) % STAGES * SIZE; }
  __device__ Barrier barrier(int unit) const { return Barrier(barriers + (unit - first) % STAGES); }

  __device__ void fetch(const Keys& keys, const Values& values, int unit) const {
    keys.template fetch<UNIT>(barrier(unit), stage(unit), unit * UNIT, count(unit));
    values.template fetch<UNIT>(barrier(unit), stage(unit) + Keys::bytes(UNIT), unit * UNIT, count(unit));
    barrier(unit).started();
  }

  __device__ void open(Keys& keys, Values& values, int unit) const {
    barrier(unit).wait((unit - first) / STAGES & 1);
    keys.template open<UNIT>(stage(unit), unit * UNIT);
    values.template open<UNIT>(stage(unit) + Keys::bytes(UNIT), unit * UNIT);
  }
};

// All units of a ring, by its warp, STEP tokens at a time: more of them share the exchanges between
// lanes, but code that is too long does not stay in the instruction cache.
template <int UNIT, int STEP, int STAGES, int NT, typename Keys, typename Values>
__device__ void attend(const Ring<UNIT, STAGES, Keys, Values>& ring, Keys& keys, Values& values, Softmax<NT>& softmax) {
  constexpr int TILES = STEP / 16;
  for (int unit = ring.first; unit < ring.last; ++unit) {
    const int count = ring.count(unit);
    sync_warp();  // all lanes are done with the stage before this one
    if (unit + STAGES - 1 < ring.last) ring.fetch(keys, values, unit + STAGES - 1);
    ring.open(keys, values, unit);
#pragma unroll 1
    for (int base = 0; base < UNIT / 16; base += TILES) {
      float p[TILES][NT][4], size[TILES][2];
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        keys.scores(base + i, count, p[i]);
        values.sizes(base + i, count, size[i]);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int k = 0; k < 4; ++k)
            if ((base + i) * 16 + token_of_row(lane_row() + k / 2 * 8) >= count) p[i][n][k] = 2 * NOTHING;
      }
      softmax.template weigh<TILES>(p, size, values);
#pragma unroll
      for (int i = 0; i < TILES; ++i) values.add(base + i, count, p[i]);
    }
    values.close();
  }
}

// Adds up what the warps of a block left in part[warp][column][WIDE], and stores it.
template <int WARPS, int WIDE>
__device__ void merge(const float* part, int room_of_warp, int columns, float* out, int64_t stride) {
  for (int i = threadIdx.x; i < columns * WIDE; i += WARPS * 32) {
    int column = i / WIDE, at = i % WIDE;
    const float* from = part + column * WIDE;
    float top = NOTHING, sum = 0;
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, from[w * room_of_warp + WIDE - 2]);
    for (int w = 0; w < WARPS; ++w)
      sum += from[w * room_of_warp + at] * power_of_two(from[w * room_of_warp + WIDE - 2] - top);
    out[column * stride + at] = at == WIDE - 2 ? top : sum;
  }
}

// queries, out: (B, H * group, length, D). sums: (B * H * group * length, gridDim.x, WIDE), where the
// last two numbers are the maximum (base 2) and the sum. counters: (gridDim.y), zeros. Blocks from
// `splits` on take EACH exact tokens a warp.
template <typename Keys, typename Values, typename T, int D, int NT, int UNIT, int STEP, int WARPS, int STAGES,
          bool CAUSAL>
__device__ void attend_split(Keys keys, Values values, const T* queries, const T* head_keys, const T* head_values,
                             const T* tail_keys, const T* tail_values, float scale, float exact_scale,
                             Shape shape, int splits, u32* counters, float* sums, T* out) {
  extern __shared__ __align__(16) char memory[];
  using Stages = Ring<UNIT, STAGES, Keys, Values>;
  constexpr int WIDE = D * Values::PLANES + 2;
  const int warp = threadIdx.x / 32, blocks = (shape.columns() + 8 * NT - 1) / (8 * NT);
  const int64_t row = blockIdx.y / blocks;  // of B * H
  const int start = blockIdx.y % blocks * 8 * NT, columns = min(8 * NT, shape.columns() - start);
  const T* q = queries + (row * shape.columns() + start) * D;
  char* shared = memory + room(WARPS * STAGES * 8);
  auto* part = reinterpret_cast<float*>(shared);  // of all warps, once their rings are done
  float* own = part + warp * columns * WIDE;
  if (static_cast<int>(blockIdx.x) < splits) {
    const int64_t units = (shape.coded + UNIT - 1) / UNIT;
    const int parts = splits * WARPS, place = blockIdx.x * WARPS + warp;
    Stages ring{shared + warp * Stages::SIZE, reinterpret_cast<uint64_t*>(memory) + warp * STAGES, shape.coded,
                static_cast<int>(units * place / parts), static_cast<int>(units * (place + 1) / parts)};
    ring.start(keys, values);
    char* tables = shared + WARPS * STAGES * Stages::SIZE;
    auto* rows = reinterpret_cast<float*>(tables + Keys::TABLES + Values::TABLES);
    for (int i = threadIdx.x; i < 8 * NT * D; i += WARPS * 32) rows[i] = i < columns * D ? number(q[i]) * scale : 0;
    keys.load(tables, WARPS * 32), values.load(tables + Keys::TABLES, WARPS * 32), values.share(keys);
    sync_block();
    keys.prepare(rows);
    sync_block();
    Softmax<NT> softmax;
    attend<UNIT, STEP>(ring, keys, values, softmax);
    sync_block();
    values.finish(own, WIDE, columns);
    for (int n = 0; n < NT; ++n)
      for (int j = 0; j < 2; ++j) {
        int column = n * 8 + 2 * lane_column() + j;
        float sum = sum_of_rows(softmax.sum[n][j]);
        if (lane_row() == 0 && column < columns)
          own[column * WIDE + WIDE - 2] = softmax.top[n][j], own[column * WIDE + WIDE - 1] = sum;
      }
  } else {
    Exact<T, D> exact{head_keys + row * shape.head * D, head_values + row * shape.head * D,
                      tail_keys + row * shape.tail * D, tail_values + row * shape.tail * D, shape};
    int first = ((blockIdx.x - splits) * WARPS + warp) * Exact<T, D>::EACH;
    exact.template attend<CAUSAL, WIDE>(q, exact_scale, first, start, columns, own);
  }
  sync_block();
  const int64_t first_row = row * shape.columns() + start, count = gridDim.x;
  merge<WARPS, WIDE>(part, columns * WIDE, columns, sums + (first_row * count + blockIdx.x) * WIDE, count * WIDE);
  if (last_of(count, counters + blockIdx.y, reinterpret_cast<int*>(memory)))
    for (int column = warp; column < columns; column += WARPS)
      combine<T, D, Values::PLANES>(sums + (first_row + column) * count * WIDE, count, out + (first_row + column) * D);
}
