// Rotary position embedding on the CPU: queries and keys, forward, backward and in place.
#include <opwright/kernel.h>
#include <opwright/vec.h>

using opwright::compute_t;
using opwright::kLanes;
using opwright::Vec;
using opwright::View;

// Time steps whose tables stay in the first-level cache while all heads pass: 8 KiB at 64 angles.
constexpr int64_t kTileTimes = 16;
// Angles of a tile that are copied at a time, with both tables and each angle twice: 32 KiB.
constexpr int64_t kMaxAngles = 128;

// Queries or keys, and where they go.
template <typename T>
struct Heads {
  View<const T, 4> from;
  View<T, 4> to;
  bool is_in_place() const { return from.data() == to.data(); }
  bool has_adjacent_columns() const {
    return from.size(3) == 1 || (from.stride(3) == 1 && to.stride(3) == 1);
  }
};

// Angles as adjacent floats or doubles.
template <typename V>
OPWRIGHT_INLINE V load_table(const float* from) {
  if constexpr (opwright::detail::kSame<V, Vec<float>>) {
    return opwright::load(from);
  } else {
    V wide;
    for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(wide[0])); ++i) wide[i] = from[i];
    return wide;
  }
}

// Columns i and i + half are a pair, for the first `count` of them.
template <typename T>
void turn_halves(const T* from, T* to, const float* cos, const float* sin, int64_t count,
                 int64_t half, compute_t<T> sign) {
  using S = compute_t<T>;
  using V = Vec<S>;
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) {
    const V a = opwright::load(from + i), b = opwright::load(from + half + i);
    const V c = load_table<V>(cos + i), s = load_table<V>(sin + i) * sign;
    opwright::store(to + i, a * c - b * s);
    opwright::store(to + half + i, b * c + a * s);
  }
  for (; i < count; ++i) {
    const S a = static_cast<S>(from[i]), b = static_cast<S>(from[half + i]);
    const S c = cos[i], s = sin[i] * sign;
    to[i] = T(a * c - b * s);
    to[half + i] = T(b * c + a * s);
  }
}

// Columns 2i and 2i + 1 are a pair. The tables have each cosine twice, and -sin and sin.
template <typename T>
void turn_neighbours(const T* from, T* to, const float* cos, const float* sin, int64_t columns) {
  using S = compute_t<T>;
  int64_t i = 0;
  if constexpr (sizeof(S) == 4) {
    using Bits = opwright::detail::UInt64Vec;
    for (; i + kLanes<T> <= columns; i += kLanes<T>) {
      const Vec<S> x = opwright::load(from + i);
      const Bits pairs = opwright::bit_cast<Bits>(x);
      const Vec<S> other = opwright::bit_cast<Vec<S>>((pairs << 32) | (pairs >> 32));
      opwright::store(to + i, x * opwright::load(cos + i) + other * opwright::load(sin + i));
    }
  }
  for (; i < columns; i += 2) {
    const S a = static_cast<S>(from[i]), b = static_cast<S>(from[i + 1]);
    to[i] = T(a * S(cos[i]) + b * S(sin[i]));
    to[i + 1] = T(b * S(cos[i + 1]) + a * S(sin[i + 1]));
  }
}

// Any strides.
template <typename T>
void turn_apart(const Heads<T>& heads, int64_t b, int64_t h, int64_t t,
                const View<const float, 3>& cos, const View<const float, 3>& sin, compute_t<T> sign,
                bool interleaved) {
  using S = compute_t<T>;
  const int64_t half = cos.size(2);
  for (int64_t i = 0; i < half; ++i) {
    const int64_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
    const S x = static_cast<S>(heads.from(b, h, t, first));
    const S y = static_cast<S>(heads.from(b, h, t, second));
    const S c = cos(b, t, i), s = sin(b, t, i) * sign;
    heads.to(b, h, t, first) = T(x * c - y * s);
    heads.to(b, h, t, second) = T(y * c + x * s);
  }
  if (heads.is_in_place()) return;
  for (int64_t i = 2 * half; i < heads.from.size(3); ++i) {
    heads.to(b, h, t, i) = heads.from(b, h, t, i);
  }
}

// Tables of one tile: rows of adjacent floats.
struct Tables {
  const float *cos, *sin;
  int64_t cos_pitch, sin_pitch;
};

// Copies a part of both tables into `to`. Interleaved, each angle stands twice, with -sin and sin.
Tables copy_tables(const View<const float, 3>& cos, const View<const float, 3>& sin, int64_t b,
                   int64_t first_time, int64_t times, int64_t first, int64_t count, float sign,
                   bool interleaved, float (&to)[4 * kTileTimes * kMaxAngles]) {
  const int64_t pitch = interleaved ? 2 * kMaxAngles : kMaxAngles;
  float* const sines = to + kTileTimes * pitch;
  for (int64_t t = 0; t < times; ++t) {
    float *to_cos = to + t * pitch, *to_sin = sines + t * pitch;
    for (int64_t i = 0; i < count; ++i) {
      const float c = cos(b, first_time + t, first + i), s = sin(b, first_time + t, first + i);
      if (interleaved) {
        to_cos[2 * i] = to_cos[2 * i + 1] = c;
        to_sin[2 * i] = -s * sign, to_sin[2 * i + 1] = s * sign;
      } else {
        to_cos[i] = c, to_sin[i] = s;
      }
    }
  }
  return {to, sines, pitch, pitch};
}

template <typename T>
void rotate_all(const Heads<T> (&both)[2], const View<const float, 3>& cos,
                const View<const float, 3>& sin, bool interleaved, float sign) {
  const int64_t batch = cos.size(0), all_times = cos.size(1), half = cos.size(2);
  const int64_t tiles = (all_times + kTileTimes - 1) / kTileTimes, dim = both[0].from.size(3);
  const int64_t heads = both[0].from.size(1) + both[1].from.size(1);
  const bool is_adjacent = both[0].has_adjacent_columns() && both[1].has_adjacent_columns();
  const bool is_copied = interleaved || (half > 1 && (cos.stride(2) != 1 || sin.stride(2) != 1));
  const int64_t most = is_copied ? kMaxAngles : half;  // angles at a time
  const int64_t elements = (all_times < kTileTimes ? all_times : kTileTimes) * heads * dim;
  const auto rotate_tile = [&](int64_t b, int64_t first_time, int64_t times) {
    for (const Heads<T>& these : both) {
      if (is_adjacent && (these.is_in_place() || dim == 2 * half)) continue;
      for (int64_t h = 0; h < these.from.size(1); ++h) {
        for (int64_t t = first_time; t < first_time + times; ++t) {
          if (!is_adjacent)
            turn_apart<T>(these, b, h, t, cos, sin, sign, interleaved);
          else
            __builtin_memcpy(&these.to(b, h, t, 2 * half), &these.from(b, h, t, 2 * half),
                             (dim - 2 * half) * sizeof(T));
        }
      }
    }
    float buffer[4 * kTileTimes * kMaxAngles];
    for (int64_t first = 0; is_adjacent && first < half; first += most) {
      const int64_t count = half - first < most ? half - first : most;
      const Tables tables =
          is_copied
              ? copy_tables(cos, sin, b, first_time, times, first, count, sign, interleaved, buffer)
              : Tables{&cos(b, first_time, first), &sin(b, first_time, first), cos.stride(1),
                       sin.stride(1)};
      for (const Heads<T>& these : both) {
        for (int64_t h = 0; h < these.from.size(1); ++h) {
          for (int64_t t = 0; t < times; ++t) {
            const int64_t column = interleaved ? 2 * first : first;
            const T* from = &these.from(b, h, first_time + t, column);
            T* to = &these.to(b, h, first_time + t, column);
            const float *c = tables.cos + t * tables.cos_pitch,
                        *s = tables.sin + t * tables.sin_pitch;
            if (interleaved)
              turn_neighbours<T>(from, to, c, s, 2 * count);
            else
              turn_halves<T>(from, to, c, s, count, half, sign);
          }
        }
      }
    }
  };
  opwright::parallel_for(
      batch * tiles, opwright::grain_of(elements), [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile) {
          const int64_t first = tile % tiles * kTileTimes;
          rotate_tile(tile / tiles, first,
                      all_times - first < kTileTimes ? all_times - first : kTileTimes);
        }
      });
}

template <typename T>
void rotate(View<const T, 4> q, View<const T, 4> k, View<const float, 3> cos,
            View<const float, 3> sin, bool interleaved, View<T, 4> output0, View<T, 4> output1) {
  rotate_all<T>({{q, output0}, {k, output1}}, cos, sin, interleaved, 1);
}

template <typename T>
void rotate_backward(View<const T, 4> grad_output0, View<const T, 4> grad_output1,
                     View<const float, 3> cos, View<const float, 3> sin, bool interleaved,
                     View<T, 4> grad_q, View<T, 4> grad_k) {
  rotate_all<T>({{grad_output0, grad_q}, {grad_output1, grad_k}}, cos, sin, interleaved, -1);
}

// A tensor that is written into, as one that is read.
template <typename T>
View<const T, 4> read_only(const View<T, 4>& view) {
  return {view.data(),
          {view.size(0), view.size(1), view.size(2), view.size(3)},
          {view.stride(0), view.stride(1), view.stride(2), view.stride(3)}};
}

template <typename T>
void rotate_(View<T, 4> q, View<T, 4> k, View<const float, 3> cos, View<const float, 3> sin,
             bool interleaved) {
  rotate_all<T>({{read_only(q), q}, {read_only(k), k}}, cos, sin, interleaved, 1);
}

OPWRIGHT_KERNEL(rotate, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(rotate_backward, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(rotate_, float, double, opwright::half, opwright::bfloat16)
