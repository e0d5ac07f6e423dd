// Nearest codewords. Vectors and codewords are whole numbers, so that scores are exact.

constexpr int EACH = 4;  // vectors of a thread

// x: (count, V); rows: (K, V + 1), codewords and half their squared norms; index: (count).
template <int V>
__device__ void search(const float* x, const float* rows, int64_t count, int size, uint8_t* index) {
  extern __shared__ __align__(16) float book[];  // a codeword, its half norm, 3 unused
  constexpr int WIDE = V + 4;
  for (int i = threadIdx.x; i < size * (V + 1); i += blockDim.x)
    book[i / (V + 1) * WIDE + i % (V + 1)] = rows[i];
  __syncthreads();
  int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.x * EACH + threadIdx.x;
  float own[EACH][V], best[EACH];
  int found[EACH];
  for (int e = 0; e < EACH; ++e) {
    int64_t at = min(base + e * static_cast<int64_t>(blockDim.x), count - 1);
    for (int j = 0; j < V; ++j) own[e][j] = fminf(fmaxf(rintf(x[at * V + j] * 128), -1023.0f), 1023.0f);
    best[e] = -3.0e38f, found[e] = 0;
  }
  for (int k = 0; k < size; ++k) {
    float word[V], half = book[k * WIDE + V];
    for (int j = 0; j < V; ++j) word[j] = book[k * WIDE + j];
    for (int e = 0; e < EACH; ++e) {
      float score = -half;
      for (int j = 0; j < V; ++j) score = fmaf(own[e][j], word[j], score);
      if (score > best[e]) best[e] = score, found[e] = k;
    }
  }
  for (int e = 0; e < EACH; ++e) {
    int64_t at = base + e * static_cast<int64_t>(blockDim.x);
    if (at < count) index[at] = found[e];
  }
}
