// From the arguments of a call to what the steps work on.
#pragma once

#include "forward.h"
#include "products.h"

namespace opwright_ops {

using opwright::parallel_for;

// Work of a step, in multiplications, that pays for another thread: its barrier costs 0.1 us, and
// one core does 40 to 60 multiplications in a nanosecond (2-core Xeon, Sapphire Rapids class).
constexpr int64_t kWorkPerThread = 1 << 15;

// Bytes of weights that a core reads again at every step from its own caches (the same machine: 2
// MiB).
constexpr int64_t kCoreCache = 3 << 19;

// Rows of the input up to which their product is taken with that of h, step by step.
constexpr int64_t kShortRows = 16;

template <typename T>
struct Arguments {
  using E = opwright::compute_t<T>;
  using O = operand_t<T>;
  static constexpr int N = opwright::kLanes<E>;

  View<const T, 3> input;
  View<const T, 2> h_0, c_0, weight_ih, weight_hh;
  View<const T, 1> bias_ih, bias_hh;
  View<const T, 2> weight_hr, peephole;
  View<const T, 1> norm_ih, norm_hh;
  View<const T, 2> norm_c, h_mask;
  View<const int64_t, 1> lengths;
  View<const bool, 2> reset;
  View<const int64_t, 1> seed;
  bool reverse;
  Options<E> options;

  int64_t H() const { return weight_hh.size(0) / 4; }
  int64_t R() const { return weight_hh.size(1); }

  void check() const {
    opwright::check(weight_hr.defined() || R() == H(),
                    "`weight_hh` must be [4 H, H], or `weight_hr` must project h to its width");
    const int norms = norm_ih.defined() + norm_hh.defined() + norm_c.defined();
    opwright::check(norms == 0 || norms == 3, "`norm_ih`, `norm_hh` and `norm_c` come together");
  }

  bool is_plain() const {
    const auto& o = options;
    return !(o.has_hard_sigmoid || o.has_hard_tanh || o.is_coupled || o.clips || o.zoneout_h ||
             o.zoneout_c || peephole.defined() || norm_c.defined() || reset.defined());
  }
};

// Of the random words, those below are `probability` of all.
inline uint32_t threshold(double probability) {
  const double scaled = probability * 4294967296.0;
  return scaled >= 4294967295.0 ? 4294967295u : static_cast<uint32_t>(scaled);
}

template <typename E, typename Activation>
Options<E> options_of(Activation activation, double slope, bool coupled, double clip,
                      double zoneout_h, double zoneout_c, bool draws) {
  return {activation == Activation::hard || activation == Activation::hard_sigmoid,
          activation == Activation::hard || activation == Activation::hard_tanh,
          coupled,
          clip != 0,
          static_cast<E>(slope),
          static_cast<E>(clip),
          static_cast<E>(zoneout_h),
          static_cast<E>(zoneout_c),
          draws,
          threshold(zoneout_h),
          threshold(zoneout_c)};
}

// `rows` vectors of `width` elements, each rounded up to `padded`; value(row, column).
template <typename E, typename Value>
void fill(Buffer<E>& to, int64_t rows, int64_t width, int64_t padded, const Value& value) {
  to.allocate_zeros(rows * padded);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < width; ++column)
      to[row * padded + column] = value(row, column);
  }
}

template <typename E, typename T>
void read_parameters(Parameters<E, operand_t<T>>& p, const Arguments<T>& a) {
  constexpr int N = Arguments<T>::N;
  p.H = a.H(), p.R = a.R();
  p.Hp = round_up(p.H, N), p.Rp = round_up(p.R, N);
  p.options = a.options;
  p.reset = a.reset, p.seed = a.seed;
  p.is_projected = a.weight_hr.defined();
  const int64_t H = p.H;
  const auto gate = [H](const View<const T, 1>& from) {
    return [&from, H](int64_t j, int64_t u) { return static_cast<E>(from(j * H + u)); };
  };
  const auto matrix = [](const View<const T, 2>& from) {
    return [&from](int64_t j, int64_t u) { return static_cast<E>(from(j, u)); };
  };
  p.bias.allocate_zeros(4 * p.Hp);
  for (const auto& bias : {a.bias_ih, a.bias_hh}) {
    for (int64_t j = 0; bias.defined() && j < 4; ++j) {
      for (int64_t u = 0; u < H; ++u) p.bias[j * p.Hp + u] += static_cast<E>(bias(j * H + u));
    }
  }
  if (a.peephole.defined()) fill(p.peephole, 3, H, p.Hp, matrix(a.peephole));
  if (a.norm_hh.defined()) fill(p.norm_hh, 4, H, p.Hp, gate(a.norm_hh));
  if (a.norm_c.defined()) fill(p.norm_c, 2, H, p.Hp, matrix(a.norm_c));
  if (a.h_mask.defined()) {
    const int64_t B = a.h_mask.size(0);
    fill(p.mask, B, p.R, p.Rp, matrix(a.h_mask));
    p.h_mask = Sequence<E>(View<const E, 3>{p.mask.data(), {1, B, p.R}, {0, p.Rp, 1}});
  }
}

template <typename T>
int team_size(const Arguments<T>& a, int64_t panels) {
  const int64_t work = 4 * a.H() * a.R() * a.input.size(1);
  int64_t size = opwright::num_threads();
  if (size > work / kWorkPerThread) size = work / kWorkPerThread;
  if (size > panels) size = panels;
  return size < 1 ? 1 : static_cast<int>(size);
}

// Compact rows of a sequence as operands: in place where they are, else copied.
template <typename O, typename T>
Matrix<O> rows_of(const Schedule& schedule, View<const T, 3> from, Buffer<O>& memory) {
  const int64_t B = from.size(1), width = from.size(2);
  if constexpr (opwright::detail::kSame<O, T>) {
    const bool is_matrix = schedule.is_full() && (width == 1 || from.stride(2) == 1) &&
                           (B == 1 || from.size(0) == 1 || from.stride(0) == B * from.stride(1));
    const int64_t stride = B == 1 ? from.stride(0) : from.stride(1);
    if (is_matrix && width % kPair<O> == 0 && stride >= width) {
      return Matrix<O>(const_cast<O*>(from.data()), schedule.rows(), width, stride);
    }
  }
  const int64_t padded = round_up(width, kPair<O>);
  memory.allocate(schedule.rows() * padded);
  parallel_for(schedule.steps, opwright::grain_of(B * width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t place = 0; place < schedule.active(t); ++place) {
        O* row = memory.data() + (schedule.first_row(t) + place) * padded;
        const T* source = from.data() + t * from.stride(0) + schedule.entry(place) * from.stride(1);
        for (int64_t i = 0; i < width; ++i) row[i] = static_cast<O>(source[i * from.stride(2)]);
        if (padded > width) row[width] = O(0.0f);
      }
    }
  });
  return Matrix<O>(memory.data(), schedule.rows(), width, padded);
}

// A weight as an operand.
template <typename O, typename T>
Matrix<O> weight_of(View<const T, 2> from, Buffer<O>& memory) {
  if constexpr (opwright::detail::kSame<O, T>) return Matrix<O>(from);
  const int64_t rows = from.size(0), columns = from.size(1);
  memory.allocate(rows * columns);
  parallel_for(rows, opwright::grain_of(columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        memory[row * columns + column] = static_cast<O>(from(row, column));
      }
    }
  });
  return Matrix<O>(memory.data(), rows, columns, columns);
}

// Whether a weight can be read row by row as it is.
template <typename O, typename T>
bool is_rows(View<const T, 2> weight) {
  return opwright::detail::kSame<O, T> && (weight.stride(1) == 1 || weight.size(1) == 1);
}

// Whether steps read `count` elements of weight_hh so much faster in panels that packing them pays.
// It is not to depend on the number of threads, since sums are in another order.
template <typename O>
bool packing_pays(const Schedule& schedule, int64_t count) {
  constexpr int64_t kFewSteps = 4, kManySteps = 32;
  if (schedule.entries > kDotRows) return schedule.steps > kFewSteps;
  // Rows of floats that come from the third level come as fast as panels.
  const bool is_cached = count * int64_t{sizeof(O)} <= 2 * kCoreCache;
  return schedule.steps >= kManySteps && (sizeof(O) == 2 || is_cached);
}

template <typename O, typename T>
GateRows<O> gate_rows(View<const T, 2> weight) {
  return {reinterpret_cast<const O*>(weight.data()), weight.stride(0), weight.size(1),
          weight.size(0) / 4};
}

// The panels of weight_hh for the gates: each has one register of units of all four.
template <typename O, typename T>
void pack_gates(Panels<O>& panels, Buffer<O>& memory, View<const T, 2> weight) {
  constexpr int N = opwright::kLanes<O>;
  const int64_t H = weight.size(0) / 4, R = weight.size(1);
  panels = Panels<O>(R, round_up(H, N) * 4);
  memory.allocate(panels.size());
  panels.data = memory.data();
  parallel_for(panels.count, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const auto unit_of = [&](int64_t column) { return panel * N + column % N; };
      if constexpr (opwright::detail::kSame<O, T>) {
        if (is_rows<O>(weight)) {
          const O* columns[kPanelColumns<O>];
          for (int64_t c = 0; c < kPanelColumns<O>; ++c) {
            columns[c] = unit_of(c) < H
                             ? weight.data() + (c / N * H + unit_of(c)) * weight.stride(0)
                             : nullptr;
          }
          pack_columns(panels[panel], R, columns);
          continue;
        }
      }
      pack_panel(panels[panel], R, [&](int64_t row, int64_t column) {
        return unit_of(column) < H ? static_cast<O>(weight(column / N * H + unit_of(column), row))
                                   : O(0.0f);
      });
    }
  });
}

// Calls body(row) for all compact rows.
template <typename Body>
void for_rows(int64_t rows, int64_t width, const Body& body) {
  parallel_for(rows, opwright::grain_of(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

// weight_ih @ x as compact rows of 4H.
template <typename E, typename O, typename T>
void multiply_inputs(E* to, const Schedule& schedule, const Arguments<T>& a, const Matrix<O>& x) {
  Buffer<O> memory;
  const Matrix<O> weight = weight_of<O>(a.weight_ih, memory);
  multiply(Matrix<E>(to, schedule.rows(), 4 * a.H(), 4 * a.H()), x, weight.transposed());
}

template <typename E, typename T>
void normalise(E* rows, const Schedule& schedule, const Arguments<T>& a) {
  const int64_t width = 4 * a.H();
  for_rows(schedule.rows(), width, [&](int64_t row) {
    E* values = rows + row * width;
    const auto [mean, scale] = moments_of_row<E>(values, width);
    for (int64_t i = 0; i < width; ++i)
      values[i] = (values[i] - mean) * scale * static_cast<E>(a.norm_ih(i));
  });
}

// Zeros after the end of each entry.
template <typename T>
void clear_rest(const Schedule& schedule, View<T, 3> sequence) {
  if (schedule.is_full() || !sequence.numel()) return;
  for (int64_t t = 0; t < schedule.steps; ++t) {
    for (int64_t place = schedule.active(t); place < schedule.entries; ++place) {
      T* row =
          sequence.data() + t * sequence.stride(0) + schedule.entry(place) * sequence.stride(1);
      __builtin_memset(static_cast<void*>(row), 0, sequence.size(2) * sizeof(T));
    }
  }
}

template <typename E, typename T>
Sequence<E> sequence_of(View<T, 3> view) {
  return view.numel() ? Sequence<E>(view) : Sequence<E>();
}

// Sets the state before the first step.
template <typename T, typename E, typename O>
void start(Forward<E, O>& forward, View<const T, 2> h_0, View<const T, 2> c_0,
           View<const T, 2> h_mask) {
  const auto& layer = forward.layer;
  const Schedule& schedule = forward.schedule;
  for (int64_t place = 0; place < schedule.entries; ++place) {
    const int64_t entry = schedule.entry(place);
    const int64_t first = schedule.reverse ? schedule.length(place) - 1 : 0;
    const bool resets = first >= 0 && layer.resets(first, entry);
    for (int64_t u = 0; u < layer.H; ++u)
      forward.c[place * layer.Hp + u] = c_0.defined() ? static_cast<E>(c_0(entry, u)) : E(0);
    for (int64_t u = 0; u < layer.R; ++u) {
      const T value = h_0.defined() ? h_0(entry, u) : T(0.0f);
      if (forward.h.data()) forward.h[place * layer.Rp + u] = value;
      E operand = resets ? E(0) : static_cast<E>(value);
      if (h_mask.defined())
        operand = static_cast<E>(static_cast<T>(operand * static_cast<E>(h_mask(entry, u))));
      for (auto& rows : forward.operand) rows[place * layer.Rp + u] = static_cast<O>(operand);
    }
  }
}

// Takes the state after the last step.
template <typename T, typename E, typename O>
void finish(const Forward<E, O>& forward, View<const T, 2> h_0, View<T, 3> output, View<T, 2> h_n,
            View<T, 2> c_n) {
  const auto& layer = forward.layer;
  const Schedule& schedule = forward.schedule;
  for (int64_t place = 0; place < schedule.entries; ++place) {
    const int64_t entry = schedule.entry(place), length = schedule.length(place);
    const int64_t last = schedule.reverse ? 0 : length - 1;
    for (int64_t u = 0; u < layer.R; ++u)
      h_n(entry, u) = length ? output(last, entry, u) : h_0.defined() ? h_0(entry, u) : T(0.0f);
    for (int64_t u = 0; u < layer.H; ++u)
      c_n(entry, u) = static_cast<T>(forward.c[place * layer.Hp + u]);
  }
}

}  // namespace opwright_ops
