// Rotary position embedding on a GPU: queries and keys in one launch, forward, backward and in
// place. NOTES.md has the layout.
#include <opwright/copy.cuh>
#include <opwright/kernel.h>
#include <opwright/launch.cuh>
#include <opwright/vector.cuh>

using opwright::compute_t;
using opwright::kPackWidth;
using opwright::Pack;
using opwright::View;

// Threads of a block: pairs of packs side by side, and time steps.
// Eight blocks for each multiprocessor leave 64 registers to a thread: enough for its packs.
constexpr int kMaxThreads = 128, kMinBlocks = 8;
// Heads that a thread rotates with one read of the tables.
constexpr int kHeads = 2;
// A pack that comes through shared memory.
constexpr int kStagedBytes = 16;
// Results of more bytes are written as streamed: the second-level cache of an H100 has 50 MB, and
// would not hold them until they are read.
constexpr int64_t kMostCached = int64_t{32} << 20;

// Queries or keys as a thread walks them.
template <typename T>
struct Plane {
  T* data;
  int64_t batch, head, time, column;  // strides
};

// Queries or keys, and where they go.
template <typename T>
struct Heads {
  Plane<const T> from;
  Plane<T> to;
  int count;
};

struct Table {
  const float* data;
  int64_t batch, time, column;  // strides
};

template <typename T>
struct Rotation {
  Heads<T> q, k;
  Table cos, sin;
  float sign;
  bool interleaved, is_in_place, are_times_inner, is_streamed;
  int64_t times, half, dim;
  int64_t pairs, columns;  // of packs in a row: rotated; with those that are copied
  unsigned tiles, chunks;  // of time steps, of heads
};

// N adjacent angles, in loads of at most 16 bytes.
template <int N, typename S>
__device__ OPWRIGHT_INLINE void load_angles(const float* at, S* to) {
  if constexpr (N == 2) {
    const float2 both = *reinterpret_cast<const float2*>(at);
    to[0] = both.x, to[1] = both.y;
  } else {
    constexpr int kWidth = N < 4 ? 1 : 4;
    OPWRIGHT_UNROLL
    for (int i = 0; i < N; i += kWidth) {
      const Pack<float, kWidth> pack = opwright::load_pack<kWidth>(at + i);
      OPWRIGHT_UNROLL
      for (int j = 0; j < kWidth; ++j) to[i + j] = pack.elements[j];
    }
  }
}

// Rotates a pair. One fma wherever it lies, so that it has the same bits.
template <typename S>
__device__ OPWRIGHT_INLINE void turn_one(S x, S y, S c, S s, S& to_x, S& to_y) {
  to_x = opwright::fma(x, c, -(y * s));
  to_y = opwright::fma(y, c, x * s);
}

// Rotates the pairs of two packs. Interleaved, those within each pack; otherwise the elements of
// the one and of the other.
template <int N, typename S>
__device__ OPWRIGHT_INLINE void turn(S (&a)[N], S (&b)[N], const S (&c)[N], const S (&s)[N],
                                     bool interleaved) {
  if (N > 1 && interleaved) {
    OPWRIGHT_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      const S x = a[2 * i], y = a[2 * i + 1], z = b[2 * i], w = b[2 * i + 1];
      turn_one(x, y, c[i], s[i], a[2 * i], a[2 * i + 1]);
      turn_one(z, w, c[N / 2 + i], s[N / 2 + i], b[2 * i], b[2 * i + 1]);
    }
  } else {
    OPWRIGHT_UNROLL
    for (int i = 0; i < N; ++i) {
      const S x = a[i], y = b[i];
      turn_one(x, y, c[i], s[i], a[i], b[i]);
    }
  }
}

// Stores a pack; what is streamed leaves the caches first.
template <typename T, int N>
__device__ OPWRIGHT_INLINE void store(T* at, Pack<T, N> pack, bool is_streamed) {
  if constexpr (N > 1) {
    if (is_streamed) return __stcs(reinterpret_cast<uint4*>(at), opwright::bit_cast<uint4>(pack));
  }
  opwright::store_pack(at, pack);
}

// A thread takes two packs of N elements in the rows of several heads at one time step. Packs
// behind the rotated columns are copied, two to a thread. Packs of 16 bytes come through shared
// memory.
template <typename T, int N>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks) rotate_kernel(Rotation<T> p) {
  using S = compute_t<T>;
  opwright::let_next_start();  // waits for the kernel in front, too
  // Blocks that run at the same time are neighbours in memory.
  const unsigned inner = p.are_times_inner ? p.tiles : p.chunks;
  const unsigned outer = p.are_times_inner ? p.chunks : p.tiles;
  const unsigned near = blockIdx.x % inner, far = blockIdx.x / inner;
  const unsigned chunk = p.are_times_inner ? far % outer : near;
  const unsigned tile = p.are_times_inner ? near : far % outer;
  const int64_t batch = far / outer;
  const int64_t time = static_cast<int64_t>(tile) * blockDim.y + threadIdx.y;
  if (time >= p.times) return;
  const int first_head = static_cast<int>(chunk) * kHeads;
  constexpr bool kIsShared = sizeof(Pack<T, N>) == kStagedBytes;
  extern __shared__ __align__(16) unsigned char staged_bytes[];
  // Of this thread; those of all threads lie side by side.
  Pack<T, N>* const staged =
      reinterpret_cast<Pack<T, N>*>(staged_bytes) + threadIdx.y * blockDim.x + threadIdx.x;
  const int apart = blockDim.x * blockDim.y;
  const int all = p.q.count + p.k.count;
  const int end_head = first_head + kHeads < all ? first_head + kHeads : all;
  for (int64_t column = threadIdx.x; column < p.columns; column += blockDim.x) {
    const bool is_rotated = column < p.pairs;
    int64_t first, second;
    S c[N], s[N];
    if (!is_rotated) {
      first = 2 * p.half + (column - p.pairs) * 2 * N;
      second = first + N;
    } else {
      // Single elements that are interleaved are neighbours, in packs they are in one.
      const bool is_pair = N == 1 && p.interleaved;
      first = column * (is_pair ? 2 : N);
      second = is_pair ? first + 1 : p.half + column * N;
      const float* cos = p.cos.data + batch * p.cos.batch + time * p.cos.time;
      const float* sin = p.sin.data + batch * p.sin.batch + time * p.sin.time;
      if constexpr (N == 1) {
        c[0] = cos[column * p.cos.column];
        s[0] = sin[column * p.sin.column];
      } else if (p.interleaved) {
        const int64_t left = column * (N / 2), right = p.half / 2 + left;
        load_angles<N / 2>(cos + left, c);
        load_angles<N / 2>(cos + right, c + N / 2);
        load_angles<N / 2>(sin + left, s);
        load_angles<N / 2>(sin + right, s + N / 2);
      } else {
        load_angles<N>(cos + column * N, c);
        load_angles<N>(sin + column * N, s);
      }
      OPWRIGHT_UNROLL
      for (int i = 0; i < N; ++i) s[i] *= p.sign;
    }
    const bool has_second = is_rotated || second < p.dim;
    Pack<T, N> a[kHeads], b[kHeads];
    OPWRIGHT_UNROLL
    for (int i = 0; i < kHeads; ++i) {
      const int h = first_head + i;
      if (h >= end_head) break;
      const bool is_key = h >= p.q.count;
      const Plane<const T>& plane = is_key ? p.k.from : p.q.from;
      const T* row = plane.data + batch * plane.batch + time * plane.time +
                     (is_key ? h - p.q.count : h) * plane.head;
      const T* const at = row + first * plane.column;
      const T* const second_at = row + second * plane.column;
      if constexpr (kIsShared) {
        opwright::copy_async(staged + 2 * i * apart, at);
        if (has_second) opwright::copy_async(staged + (2 * i + 1) * apart, second_at);
      } else {
        a[i] = opwright::load_pack<N>(at);
        if (has_second) b[i] = opwright::load_pack<N>(second_at);
      }
    }
    if (kIsShared) opwright::wait_for_copies();
    OPWRIGHT_UNROLL
    for (int i = 0; i < kHeads; ++i) {
      const int h = first_head + i;
      if (h >= end_head) break;
      if constexpr (kIsShared) {
        a[i] = staged[2 * i * apart];
        if (has_second) b[i] = staged[(2 * i + 1) * apart];
      }
      if (is_rotated) {
        S x[N], y[N];
        opwright::unpack(a[i], x);
        opwright::unpack(b[i], y);
        turn<N>(x, y, c, s, p.interleaved);
        a[i] = opwright::pack_of<T>(x);
        b[i] = opwright::pack_of<T>(y);
      }
      const bool is_key = h >= p.q.count;
      const Plane<T>& plane = is_key ? p.k.to : p.q.to;
      T* row = plane.data + batch * plane.batch + time * plane.time +
               (is_key ? h - p.q.count : h) * plane.head;
      store(row + first * plane.column, a[i], p.is_streamed);
      if (has_second) store(row + second * plane.column, b[i], p.is_streamed);
    }
  }
}

template <typename T>
Plane<T> plane_of(const View<T, 4>& view) {
  return {view.data(), view.stride(0), view.stride(1), view.stride(2), view.stride(3)};
}

inline Table table_of(const View<const float, 3>& view) {
  return {view.data(), view.stride(0), view.stride(1), view.stride(2)};
}

// Whether every pack of `width` elements in the rows of a tensor lies at a multiple of its size.
template <typename T, int R>
bool has_packs(const View<T, R>& view, int width) {
  if (view.size(R - 1) > 1 && view.stride(R - 1) != 1) return false;
  for (int d = 0; d < R - 1; ++d) {
    if (view.size(d) > 1 && view.stride(d) % width) return false;
  }
  return opwright::is_aligned(view.data(), width);
}

template <typename T, typename Q>
void rotate_all(const View<Q, 4>& q, const View<Q, 4>& k, const View<const float, 3>& cos,
                const View<const float, 3>& sin, bool interleaved, float sign,
                const View<T, 4>& to_q, const View<T, 4>& to_k, cudaStream_t stream) {
  Rotation<T> p{};
  const auto heads_of = [](const View<Q, 4>& from, const View<T, 4>& to) -> Heads<T> {
    return {{from.data(), from.stride(0), from.stride(1), from.stride(2), from.stride(3)},
            plane_of(to),
            static_cast<int>(from.size(1))};
  };
  p.q = heads_of(q, to_q), p.k = heads_of(k, to_k);
  p.cos = table_of(cos), p.sin = table_of(sin);
  p.sign = sign, p.interleaved = interleaved, p.is_in_place = q.data() == to_q.data();
  p.are_times_inner = q.stride(1) > q.stride(2);
  p.times = cos.size(1), p.half = cos.size(2), p.dim = q.size(3);
  constexpr int kWidth = kPackWidth<T>;
  const int angles = kWidth < 4 ? kWidth : 4;  // in one load
  const bool is_packed = p.half % kWidth == 0 && (p.is_in_place || p.dim % kWidth == 0) &&
                         has_packs(q, kWidth) && has_packs(k, kWidth) && has_packs(to_q, kWidth) &&
                         has_packs(to_k, kWidth) && has_packs(cos, angles) &&
                         has_packs(sin, angles);
  const int64_t width = is_packed ? kWidth : 1;
  const int64_t copied = p.is_in_place ? 0 : p.dim - 2 * p.half;
  p.pairs = p.half / width;
  p.columns = p.pairs + (copied + 2 * width - 1) / (2 * width);
  if (p.columns == 0) return;
  p.chunks = (p.q.count + p.k.count + kHeads - 1) / kHeads;
  const int64_t rows = cos.size(0) * p.times * (p.q.count + p.k.count);
  const int64_t written = p.is_in_place ? 2 * p.half : p.dim;
  p.is_streamed = rows * written * int64_t{sizeof(T)} > kMostCached;
  const int side = p.columns < kMaxThreads ? static_cast<int>(p.columns) : kMaxThreads;
  const int deep = p.times < kMaxThreads / side ? static_cast<int>(p.times) : kMaxThreads / side;
  const int64_t tiles = (p.times + deep - 1) / deep, blocks = cos.size(0) * tiles * p.chunks;
  p.tiles = static_cast<unsigned>(tiles);
  opwright::check(blocks < int64_t{1} << 31, "more time steps than one launch has blocks for");
  opwright::launch_behind(is_packed ? rotate_kernel<T, kWidth> : rotate_kernel<T, 1>,
                          dim3(static_cast<unsigned>(blocks)), dim3(side, deep),
                          is_packed ? side * deep * 2 * kHeads * kStagedBytes : 0, stream, p);
}

template <typename T>
void rotate(View<const T, 4> q, View<const T, 4> k, View<const float, 3> cos,
            View<const float, 3> sin, bool interleaved, View<T, 4> output0, View<T, 4> output1,
            cudaStream_t stream) {
  rotate_all(q, k, cos, sin, interleaved, 1, output0, output1, stream);
}

template <typename T>
void rotate_backward(View<const T, 4> grad_output0, View<const T, 4> grad_output1,
                     View<const float, 3> cos, View<const float, 3> sin, bool interleaved,
                     View<T, 4> grad_q, View<T, 4> grad_k, cudaStream_t stream) {
  rotate_all(grad_output0, grad_output1, cos, sin, interleaved, -1, grad_q, grad_k, stream);
}

template <typename T>
void rotate_(View<T, 4> q, View<T, 4> k, View<const float, 3> cos, View<const float, 3> sin,
             bool interleaved, cudaStream_t stream) {
  rotate_all(q, k, cos, sin, interleaved, 1, q, k, stream);
}

OPWRIGHT_KERNEL(rotate, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(rotate_backward, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(rotate_, float, double, opwright::half, opwright::bfloat16)
