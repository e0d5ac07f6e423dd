// Tokens that are not coded: sinks before the codes, and the newest tokens behind them.

struct Shape {
  int heads, group, length, coded, head, tail;  // KV heads, query heads each, new tokens, past
  __device__ int columns() const { return group * length; }
  __device__ int exact() const { return head + tail; }
};

template <typename T, int D>
struct Exact {
  static constexpr int EACH = D > 128 ? 4 : 8, OWN = D / 32;  // tokens of a warp, channels of a lane
  const T *head_keys, *head_values, *tail_keys, *tail_values;
  Shape shape;

  __device__ void load(const T* head, const T* tail, int token, float* x) const {
    const T* from = token < shape.head ? head + token * D : tail + (token - shape.head) * D;
#pragma unroll
    for (int i = 0; i < OWN; ++i) x[i] = number(from[threadIdx.x % 32 + 32 * i]);
  }

  // Of a causal step, the newest token is seen by the last query alone.
  template <bool CAUSAL>
  __device__ bool seen(int token, int column) const {
    int newest = shape.exact() - shape.length + column % shape.length;
    return token < shape.exact() && (!CAUSAL || token <= newest);
  }

  // Tokens from `first` on, for columns from `start` on of the KV head; q: their queries.
  template <bool CAUSAL, int WIDE>
  __device__ void attend(const T* q, float scale, int first, int start, int columns, float* out) const {
    float key[EACH][OWN], value[EACH][OWN];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      int token = min(first + e, shape.exact() - 1);
      load(head_keys, tail_keys, token, key[e]), load(head_values, tail_values, token, value[e]);
    }
    for (int column = 0; column < columns; ++column) {
      float query[OWN], score[EACH], top = NOTHING, sum = 0, total[OWN] = {};
#pragma unroll
      for (int i = 0; i < OWN; ++i) query[i] = number(q[column * D + threadIdx.x % 32 + 32 * i]) * scale;
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        float dot = 0;
#pragma unroll
        for (int i = 0; i < OWN; ++i) dot += query[i] * key[e][i];
        score[e] = seen<CAUSAL>(first + e, start + column) ? sum_of_warp(dot) : 2 * NOTHING;
        top = fmaxf(top, score[e]);
      }
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        float p = power_of_two(score[e] - top);
        sum += p;
#pragma unroll
        for (int i = 0; i < OWN; ++i) total[i] += p * value[e][i];
      }
      float* to = out + column * WIDE;
#pragma unroll
      for (int i = 0; i < OWN; ++i) to[threadIdx.x % 32 + 32 * i] = total[i];
      for (int i = D + threadIdx.x % 32; i < WIDE - 2; i += 32) to[i] = 0;
      if (threadIdx.x % 32 == 0) to[WIDE - 2] = top, to[WIDE - 1] = sum;
    }
  }
};
