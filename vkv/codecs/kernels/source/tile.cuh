// A tile: TOKENS tokens of all B * H rows, in shared memory as [token][row][piece], a piece
// being 8 channels. It is filled with decoded values, then rotated and stored.
// Sums and products that plain operations round one by one are rounded one by one here.

template <typename T>
struct alignas(16) Piece {
  T v[8];
};

template <typename A, typename B>
struct Same {
  static constexpr bool value = false;
};
template <typename A>
struct Same<A, A> {
  static constexpr bool value = true;
};

// What a call is about: `head` raw tokens, then `coded` ones, then `tail` raw ones.
struct Span {
  int rows, head, coded, tail;
  __device__ int total() const { return head + coded + tail; }
  __device__ bool holds(int token) const { return token >= head && token < head + coded; }
};

// Where a row of P pieces has a piece: elsewhere for each token, so that threads that hold the
// same piece of other tokens do not meet in one bank.
template <int P>
__device__ int place(int piece, int token) {
  return P & (P - 1) ? piece : piece ^ (token & (P < 8 ? P - 1 : 7));
}

// cos and sin of the 8 channels of a piece, as MLX's own rope has them.
// turn: scale, log2(base), mscale. With FREQS `freqs` replaces the base.
template <int DIMS, bool TRADITIONAL, bool FREQS>
__device__ void angles(const float* turn, const float* freqs, int piece, int position, float* c, float* s) {
  float length = turn[0] * static_cast<float>(position);
  for (int j = 0; j < 8; ++j) {
    int channel = piece * 8 + j;
    int i = TRADITIONAL ? channel / 2 : channel % (DIMS / 2);
    float d = static_cast<float>(i) / static_cast<float>(DIMS / 2);
    float inverse = FREQS ? 1.0 / freqs[i] : exp2f(-d * turn[1]);
    sincosf(length * inverse, s + j, c + j);
  }
}

template <typename T, int P, int DIMS, bool TRADITIONAL>
__device__ Piece<T> turned(
    const Piece<T>* row, int slot, int piece, float mscale, const float* c, const float* s) {
  constexpr int half = DIMS / 16;
  bool low = piece < half;
  Piece<T> x = row[place<P>(piece, slot)], y = x, out;
  if (!TRADITIONAL) y = row[place<P>(low ? piece + half : piece - half, slot)];
  for (int j = 0; j < 8; ++j) {
    bool first = TRADITIONAL ? j % 2 == 0 : low;
    float own = static_cast<float>(x.v[j]) * mscale;
    float other = static_cast<float>(TRADITIONAL ? x.v[j ^ 1] : y.v[j]) * mscale;
    out.v[j] = static_cast<T>(first ? own * c[j] - other * s[j] : other * s[j] + own * c[j]);
  }
  return out;
}

// ROPE: 0 none, 1 halves, 2 neighbours (traditional).
template <typename T, int D, int TOKENS, int ROPE, int DIMS, bool FREQS>
__device__ void store(
    const Piece<T>* tile, Span span, int first, const T* head, const T* tail, const float* turn,
    const float* freqs, T* out) {
  constexpr int P = D / 8;
  const int groups = max(1, static_cast<int>(blockDim.x) / (TOKENS * P));
  for (int item = threadIdx.x; item < groups * TOKENS * P; item += blockDim.x) {
    int piece = item % P, slot = item / P % TOKENS, token = first + slot;
    if (token >= span.total()) continue;
    bool ours = span.holds(token), turns = ROPE && ours && piece * 8 < DIMS;
    float c[8], s[8];
    if (turns) angles<ROPE ? DIMS : 16, ROPE == 2, FREQS>(turn, freqs, piece, token, c, s);
    const Piece<T>* from = tile + slot * span.rows * P;
    int64_t stride = P, start = place<P>(piece, slot);
    if (token < span.head) {
      from = reinterpret_cast<const Piece<T>*>(head);
      stride = span.head * P, start = token * P + piece;
    } else if (!ours) {
      from = reinterpret_cast<const Piece<T>*>(tail);
      stride = span.tail * P, start = (token - span.head - span.coded) * P + piece;
    }
    for (int row = item / (P * TOKENS); row < span.rows; row += groups) {
      Piece<T> x = from[row * stride + start];
      if (turns)
        x = turned<T, P, ROPE ? DIMS : 16, ROPE == 2>(from + row * P, slot, piece, turn[2], c, s);
      reinterpret_cast<Piece<T>*>(out)[(static_cast<int64_t>(row) * span.total() + token) * P + piece] = x;
    }
  }
}
