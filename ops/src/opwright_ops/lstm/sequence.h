// What the two sweeps over a sequence share: memory, the arguments, which entries take part in
// which step.
#pragma once

#include <opwright/team.h>
#include <stdlib.h>

#include "panels.h"

namespace opwright_ops {

using opwright::half;
using opwright::View;
using opwright::detail::kScalarType;

// Scratch memory that calls hand on to the next. The system gives a large block back page by page,
// at 7 ms for 16 MiB (2-core Xeon, Sapphire Rapids class, in a virtual machine), which is a tenth
// of a training step.
class Pool {
 public:
  static constexpr int64_t kLeast = 1 << 18, kMostKept = 128 << 20;

  void* take(int64_t bytes) {
    if (bytes < kLeast) return allocate(bytes);
    if (const Lock lock(*this); lock.is_held) {
      Block* best = nullptr;
      for (Block& block : blocks_) {
        if (block.bytes >= bytes && block.bytes <= 2 * bytes &&
            (!best || block.bytes < best->bytes))
          best = &block;
      }
      if (best) {
        void* memory = best->memory;
        kept_ -= best->bytes;
        *best = {};
        return memory;
      }
    }
    return allocate(bytes);
  }

  void give(void* memory, int64_t bytes) {
    if (bytes < kLeast) return free(memory);
    if (const Lock lock(*this); lock.is_held) {
      for (Block& block : blocks_) {
        if (block.memory || kept_ + bytes > kMostKept) continue;
        block = {memory, bytes};
        kept_ += bytes;
        return;
      }
    }
    free(memory);
  }

 private:
  static void* allocate(int64_t bytes) {
    void* memory = nullptr;
    return posix_memalign(&memory, 64, bytes) ? nullptr : memory;
  }

  struct Block {
    void* memory = nullptr;
    int64_t bytes = 0;
  };
  // Does not wait: in a child of fork, what another thread of the parent held is never released.
  struct Lock {
    Pool& pool;
    const bool is_held;
    explicit Lock(Pool& pool)
        : pool(pool), is_held(!__atomic_exchange_n(&pool.is_locked_, true, __ATOMIC_ACQUIRE)) {}
    ~Lock() {
      if (is_held) __atomic_store_n(&pool.is_locked_, false, __ATOMIC_RELEASE);
    }
  };
  Block blocks_[32];
  int64_t kept_ = 0;
  bool is_locked_ = false;
};
inline Pool pool;

// Memory for the time of a call, aligned to a cache line.
template <typename S>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) { allocate(count); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (data_) pool.give(data_, bytes_);
  }

  // Once for each Buffer.
  void allocate(int64_t count) {
    bytes_ = (count + 64) * static_cast<int64_t>(sizeof(S));
    data_ = static_cast<S*>(pool.take(bytes_));
    opwright::check(data_ != nullptr, "out of memory for scratch space");
  }
  void allocate_zeros(int64_t count) {
    allocate(count);
    __builtin_memset(static_cast<void*>(data_), 0, count * sizeof(S));
  }
  S* data() const { return data_; }
  S& operator[](int64_t i) const { return data_[i]; }

 private:
  S* data_ = nullptr;
  int64_t bytes_ = 0;
};

template <typename T>
struct RemoveConst {
  using type = T;
};
template <typename T>
struct RemoveConst<const T> {
  using type = T;
};
template <typename T>
using remove_const = typename RemoveConst<T>::type;

// A sequence [T, B, n] in the type of the operator's tensors: E, or one of 16 bits where E is
// float.
template <typename E>
struct Sequence {
  char* data = nullptr;
  int dtype = kScalarType<E>;
  int64_t time_stride = 0, entry_stride = 0;

  Sequence() = default;
  template <typename T>
  explicit Sequence(View<T, 3> view)
      : data(const_cast<char*>(reinterpret_cast<const char*>(view.data()))),
        dtype(kScalarType<remove_const<T>>),
        time_stride(view.stride(0)),
        entry_stride(view.stride(1)) {}

  bool exists() const { return data != nullptr; }
  int64_t at(int64_t t, int64_t entry) const { return t * time_stride + entry * entry_stride; }

  // `count` elements from there on, zeros after them.
  OPWRIGHT_INLINE Vec<E> load(int64_t from, int count) const {
    if constexpr (sizeof(E) == 4) {
      if (dtype == kScalarType<bfloat16>) return load_as<bfloat16>(from, count);
      if (dtype == kScalarType<half>) return load_as<half>(from, count);
    }
    return load_as<E>(from, count);
  }
  OPWRIGHT_INLINE void store(int64_t to, Vec<E> value, int count) const {
    if constexpr (sizeof(E) == 4) {
      if (dtype == kScalarType<bfloat16>) return store_as<bfloat16>(to, value, count);
      if (dtype == kScalarType<half>) return store_as<half>(to, value, count);
    }
    store_as<E>(to, value, count);
  }
  // Rounds to the type of the tensors.
  OPWRIGHT_INLINE Vec<E> narrowed(Vec<E> value) const {
    if constexpr (sizeof(E) == 4) {
      if (dtype == kScalarType<bfloat16>) return through<bfloat16>(value);
      if (dtype == kScalarType<half>) return through<half>(value);
    }
    return value;
  }

 private:
  template <typename T>
  OPWRIGHT_INLINE Vec<E> load_as(int64_t from, int count) const {
    const T* place = reinterpret_cast<const T*>(data) + from;
    return count == opwright::kLanes<T> ? opwright::load(place)
                                        : opwright::load_partial(place, count);
  }
  template <typename T>
  OPWRIGHT_INLINE void store_as(int64_t to, Vec<E> value, int count) const {
    T* place = reinterpret_cast<T*>(data) + to;
    if (count == opwright::kLanes<T>) return opwright::store(place, value);
    opwright::store_partial(place, value, count);
  }
  template <typename T>
  static OPWRIGHT_INLINE Vec<E> through(Vec<E> value) {
    T lanes[opwright::kLanes<T>];
    opwright::store(lanes, value);
    return opwright::load(lanes);
  }
};

// The order of steps, and the entries that take part in each. With lengths, entries are taken
// longest first, so that those of a step are the first `active(t)`; rows of all steps, one after
// the other, are "compact".
class Schedule {
 public:
  int64_t steps, entries;
  bool reverse;

  Schedule(int64_t steps, int64_t entries, bool reverse, View<const int64_t, 1> lengths)
      : steps(steps), entries(entries), reverse(reverse) {
    if (!lengths.defined()) return;
    order_.allocate(entries);
    length_.allocate(entries);
    first_.allocate_zeros(steps + 2);
    const auto length_of = [&](int64_t entry) {
      const int64_t length = lengths(entry);
      return length < 0 ? 0 : length > steps ? steps : length;
    };
    // Counting sort: first_[n] becomes the place of the next entry of length n.
    for (int64_t e = 0; e < entries; ++e) ++first_[length_of(e)];
    for (int64_t n = steps, place = 0; n >= 0; --n) {
      const int64_t count = first_[n];
      first_[n] = place;
      place += count;
    }
    for (int64_t e = 0; e < entries; ++e) {
      const int64_t place = first_[length_of(e)]++;
      order_[place] = e;
      length_[place] = length_of(e);
    }
    // Now first_[n] is the number of entries of length n or more; those with more than t take part
    // in step t.
    int64_t row = 0;
    for (int64_t t = 0; t < steps; ++t) {
      const int64_t active = first_[t + 1];
      first_[t] = row;
      row += active;
    }
    first_[steps] = row;
  }

  bool is_full() const { return !order_.data(); }
  int64_t time(int64_t step) const { return reverse ? steps - 1 - step : step; }
  int64_t active(int64_t t) const { return is_full() ? entries : first_[t + 1] - first_[t]; }
  int64_t first_row(int64_t t) const { return is_full() ? t * entries : first_[t]; }
  int64_t rows() const { return first_row(steps); }
  int64_t entry(int64_t place) const { return is_full() ? place : order_[place]; }
  int64_t length(int64_t place) const { return is_full() ? steps : length_[place]; }

 private:
  Buffer<int64_t> order_, length_, first_;
};

// The options of a cell.
template <typename E>
struct Options {
  bool has_hard_sigmoid, has_hard_tanh, is_coupled, clips;
  E slope, clip, zoneout_h, zoneout_c;
  bool draws;                         // zoneout by chance
  uint32_t threshold_h, threshold_c;  // of the random words below which an element stays
};

template <int kLanes>
struct RandomWords {
  typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
  Words first, second;
};

// Philox2x32-7: two words for each lane, the key a seed, the counters (element + lane, t).
template <int kLanes>
OPWRIGHT_INLINE RandomWords<kLanes> random_words(int64_t seed, int64_t element, int64_t t) {
  using Words = typename RandomWords<kLanes>::Words;
  constexpr uint32_t kMultiplier = 0xD256D193, kWeyl = 0x9E3779B9;
  uint32_t key = static_cast<uint32_t>(seed);
  Words a, b = Words{} + static_cast<uint32_t>(t);
  OPWRIGHT_UNROLL
  for (int l = 0; l < kLanes; ++l) a[l] = static_cast<uint32_t>(l);
  a += static_cast<uint32_t>(element);
  OPWRIGHT_UNROLL
  for (int round = 0; round < 7; ++round, key += kWeyl) {
    Words high, low;
#if defined(__AVX512F__) && !defined(__clang__)
    // GCC widens all lanes before it multiplies; the instruction takes every second lane as it is.
    if constexpr (kLanes == 16) {
      typedef int32_t Int32x16 __attribute__((vector_size(64)));
      typedef long long Products __attribute__((vector_size(64)));
      const auto multiplier = opwright::bit_cast<Int32x16>(kMultiplier - Words{});
      const auto evens = opwright::bit_cast<Int32x16>(__builtin_ia32_pmuludq512_mask(
          opwright::bit_cast<Int32x16>(a), multiplier, Products{}, -1));
      const auto odd = opwright::bit_cast<Int32x16>(opwright::bit_cast<Products>(a) >> 32);
      const auto odds = opwright::bit_cast<Int32x16>(
          __builtin_ia32_pmuludq512_mask(odd, multiplier, Products{}, -1));
      const Int32x16 highs{1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
      high = opwright::bit_cast<Words>(__builtin_shuffle(evens, odds, highs));
      low = opwright::bit_cast<Words>(a * kMultiplier);
    } else
#endif
    {
      typedef uint64_t Wide __attribute__((vector_size(8 * kLanes)));
      const Wide product = __builtin_convertvector(a, Wide) * kMultiplier;
      high = __builtin_convertvector(product >> 32, Words), low = a * kMultiplier;
    }
    a = high ^ key ^ b;
    b = low;
  }
  return {a, b};
}

// The part of h and of c that zoneout leaves as it was: 0 or 1 by chance, or the expectation.
template <typename E>
struct Kept {
  Vec<E> h, c;
};
template <typename E>
OPWRIGHT_INLINE Kept<E> kept(const Options<E>& options, int64_t seed, int64_t element, int64_t t) {
  if (!options.draws)
    return {opwright::splat<Vec<E>>(options.zoneout_h), opwright::splat<Vec<E>>(options.zoneout_c)};
  const auto words = random_words<opwright::kLanes<E>>(seed, element, t);
  return {__builtin_convertvector((words.second < options.threshold_h) & 1, Vec<E>),
          __builtin_convertvector((words.first < options.threshold_c) & 1, Vec<E>)};
}

// `count` elements, zeros after them.
template <typename E>
OPWRIGHT_INLINE Vec<E> load_first(const E* from, int count) {
  return count == opwright::kLanes<E> ? opwright::load(from) : opwright::load_partial(from, count);
}
template <typename S, typename V>
OPWRIGHT_INLINE void store_first(S* to, V value, int count) {
  if (count == opwright::kLanes<S>)
    opwright::store(to, value);
  else
    opwright::store_partial(to, value, count);
}

// The part `keep` of the value before, the rest of the new one: exactly one of them for 1 and 0.
template <typename V>
OPWRIGHT_INLINE V mixed(V keep, V before, V value) {
  return opwright::fma(keep, before, (1 - keep) * value);
}

// The gates' activations and their derivatives. kIsPlain: neither hard nor clipped.
template <bool kIsPlain, typename E>
struct Activations {
  using V = Vec<E>;
  const Options<E>& options;

  static OPWRIGHT_INLINE V clamp(V z, E limit) {
    return opwright::min(opwright::max(z, opwright::splat<V>(-limit)), opwright::splat<V>(limit));
  }
  static OPWRIGHT_INLINE V where_inside(V z, E limit, V value) {
    return opwright::select(opwright::abs(z) <= opwright::splat<V>(limit), value, V{});
  }
  OPWRIGHT_INLINE V clipped(V z) const {
    if constexpr (kIsPlain) return z;
    return options.clips ? clamp(z, options.clip) : z;
  }
  OPWRIGHT_INLINE V sigmoid(V z) const {
    if constexpr (kIsPlain) return opwright::sigmoid(z);
    z = clipped(z);
    if (!options.has_hard_sigmoid) return opwright::sigmoid(z);
    z = opwright::fma(z, opwright::splat<V>(options.slope), opwright::splat<V>(E(0.5)));
    return opwright::min(opwright::max(z, V{}), opwright::splat<V>(1));
  }
  OPWRIGHT_INLINE V tanh(V z) const {
    if constexpr (kIsPlain) return opwright::tanh(z);
    return options.has_hard_tanh ? clamp(z, 1) : opwright::tanh(z);
  }
  // value * sigmoid'(z), where s = sigmoid(z).
  OPWRIGHT_INLINE V times_d_sigmoid(V value, V z, V s) const {
    V result = value * (s * (1 - s));
    if constexpr (kIsPlain) return result;
    if (options.has_hard_sigmoid) {
      const V centred =
          opwright::fma(clipped(z), opwright::splat<V>(options.slope), opwright::splat<V>(E(0.5))) -
          E(0.5);
      result = where_inside(centred, E(0.5), value * options.slope);
    }
    return options.clips ? where_inside(z, options.clip, result) : result;
  }
  // value * tanh'(z), where s = tanh(z).
  OPWRIGHT_INLINE V times_d_tanh(V value, V z, V s) const {
    const V result = value * opwright::fma(-s, s, opwright::splat<V>(1));
    if constexpr (kIsPlain) return result;
    return options.has_hard_tanh ? where_inside(z, 1, value) : result;
  }
  // The same for the gate g, whose argument is clipped.
  OPWRIGHT_INLINE V times_d_gate_tanh(V value, V z, V s) const {
    const V result = times_d_tanh(value, clipped(z), s);
    if constexpr (kIsPlain) return result;
    return options.clips ? where_inside(z, options.clip, result) : result;
  }
};

}  // namespace opwright_ops
