// The last step: stretches of the past, each weighed by its own maximum, become one output.

// Makes the output of one query, by one warp, from (count, D * PLANES + 2) numbers. With two
// planes the second is rotated by the Hadamard transform, which values of `nsnquant` went through.
template <typename T, int D, int PLANES>
__device__ void combine(const float* part, int count, T* out) {
  constexpr int WIDE = D * PLANES + 2, OWN = D / 32;
  const int lane = threadIdx.x % 32;
  float top = NOTHING, sum = 0, total[PLANES][OWN] = {};
  for (int s = lane; s < count; s += 32) top = fmaxf(top, fresh(part + s * WIDE + WIDE - 2));
  for (int step = 1; step < 32; step *= 2) top = fmaxf(top, exchanged(top, step));
  for (int base = 0; base < count; base += 32) {
    const int own = min(base + lane, count - 1), more = min(32, count - base);
    float weight = lane < more ? power_of_two(fresh(part + own * WIDE + WIDE - 2) - top) : 0;
    sum += weight * fresh(part + own * WIDE + WIDE - 1);
#pragma unroll 8
    for (int i = 0; i < more; ++i) {
      float each = from_lane(weight, i);
#pragma unroll
      for (int k = 0; k < PLANES * OWN; ++k)
        total[k / OWN][k % OWN] += each * fresh(part + (base + i) * WIDE + k / OWN * D + lane * OWN + k % OWN);
    }
  }
  sum = sum_of_warp(sum);
  if constexpr (PLANES == 2) {
    float* x = total[1];
#pragma unroll
    for (int step = 1; step < OWN; step *= 2)
#pragma unroll
      for (int k = 0; k < OWN; ++k)
        if (!(k & step)) {
          float low = x[k], high = x[k + step];
          x[k] = low + high, x[k + step] = low - high;
        }
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
#pragma unroll
      for (int k = 0; k < OWN; ++k) {
        float other = exchanged(x[k], step);
        x[k] = lane & step ? other - x[k] : x[k] + other;
      }
#pragma unroll
    for (int k = 0; k < OWN; ++k) total[0][k] += x[k] * rsqrtf(static_cast<float>(D));
  }
#pragma unroll
  for (int k = 0; k < OWN; ++k) out[lane * OWN + k] = static_cast<T>(total[0][k] / sum);
}
