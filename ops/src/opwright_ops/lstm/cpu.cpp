// An LSTM over a sequence: one product for the inputs of all steps, then a team of threads that takes the
// steps together, each its own units, with weights packed for the call. NOTES.md has the measurements.
#include "backward.h"
#include "products.h"

using namespace opwright_ops;
using opwright::parallel_for;

namespace {

// Work of a step, in multiplications, that pays for another thread: its barrier costs 0.1 us, and one core
// does 40 to 60 multiplications in a nanosecond (2-core Xeon, Sapphire Rapids class).
constexpr int64_t kWorkPerThread = 1 << 15;

// Rows of the input up to which their product is taken with that of h, step by step, and steps up to which
// packing weight_hh does not pay.
constexpr int64_t kShortRows = 16, kFewSteps = 4;

template <typename T>
struct Arguments {
  using E = opwright::compute_t<T>;
  using O = operand_t<T>;
  static constexpr int N = opwright::kLanes<E>;
  // Whether tensors are operands of products as they are.
  static constexpr bool kIsOperand = opwright::detail::kSame<T, O>;

  View<const T, 3> input;
  View<const T, 2> h_0, c_0, weight_ih, weight_hh;
  View<const T, 1> bias;
  View<const T, 2> weight_hr, peephole;
  View<const T, 1> norm_ih, norm_hh;
  View<const T, 2> norm_c, h_mask;
  View<const int64_t, 1> lengths;
  View<const bool, 2> reset;
  View<const int64_t, 1> seed;
  bool reverse;
  Options<E> options;

  int64_t T_() const { return input.size(0); }
  int64_t B() const { return input.size(1); }
  int64_t I() const { return input.size(2); }
  int64_t H() const { return c_0.size(1); }
  int64_t R() const { return h_0.size(1); }

  void check() const {
    opwright::check(weight_hr.defined() || R() == H(),
                    "`h_0` must have the width of `c_0`, or `weight_hr` must project from one to the other");
    const int norms = norm_ih.defined() + norm_hh.defined() + norm_c.defined();
    opwright::check(norms == 0 || norms == 3, "`norm_ih`, `norm_hh` and `norm_c` come together");
  }

  bool is_plain() const {
    const auto& o = options;
    return !(o.is_hard || o.is_coupled || o.clips || o.zoneout_h || o.zoneout_c || peephole.defined() ||
             norm_c.defined() || reset.defined());
  }

  Parameters<E, O> parameters() const;
};

template <typename E>
uint32_t threshold(double probability) {
  const double scaled = probability * 4294967296.0;
  return scaled >= 4294967295.0 ? 4294967295u : static_cast<uint32_t>(scaled);
}

template <typename E, typename Activation>
Options<E> options_of(Activation activation, double slope, bool coupled, double clip, double zoneout_h,
                      double zoneout_c, bool draws) {
  return {activation == Activation::hard,      coupled, clip != 0, static_cast<E>(slope), static_cast<E>(clip),
          static_cast<E>(zoneout_h),           static_cast<E>(zoneout_c), draws,
          threshold<E>(zoneout_h),             threshold<E>(zoneout_c)};
}

// `rows` vectors of `width` elements, each rounded up to `padded`; value(row, column).
template <typename E, typename Value>
void fill(Buffer<E>& to, int64_t rows, int64_t width, int64_t padded, const Value& value) {
  to.allocate_zeros(rows * padded);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < width; ++column) to[row * padded + column] = value(row, column);
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
  if (a.bias.defined()) fill(p.bias, 4, H, p.Hp, gate(a.bias));
  else p.bias.allocate_zeros(4 * p.Hp);
  if (a.peephole.defined()) fill(p.peephole, 3, H, p.Hp, matrix(a.peephole));
  if (a.norm_hh.defined()) fill(p.norm_hh, 4, H, p.Hp, gate(a.norm_hh));
  if (a.norm_c.defined()) fill(p.norm_c, 2, H, p.Hp, matrix(a.norm_c));
  if (a.h_mask.defined()) {
    opwright::check(a.h_mask.size(1) <= 1 || a.h_mask.stride(1) == 1, "`h_mask` must be contiguous");
    p.h_mask = Sequence<E>(View<const T, 3>{a.h_mask.data(), {1, a.h_mask.size(0), a.h_mask.size(1)},
                                           {0, a.h_mask.stride(0), 1}});
  }
}

template <typename T>
int team_size(const Arguments<T>& a, int64_t panels) {
  const int64_t work = 4 * a.H() * a.R() * a.B();
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
template <typename O, typename T>
GateRows<O> gate_rows(View<const T, 2> weight) {
  return {reinterpret_cast<const O*>(weight.data()), weight.stride(0), weight.size(1), weight.size(0) / 4};
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
      pack_panel<false>(panels[panel], R, [&](int64_t row, int64_t column) {
        const int64_t gate = column / N, unit = panel * N + column % N;
        return unit < H ? static_cast<O>(weight(gate * H + unit, row)) : O(0.0f);
      });
    }
  });
}

// Mean and inverse deviation of a row; load(i, count) gives a register of it.
template <typename E, typename Load>
RowMoments<E> moments_of(const Load& load, int64_t width) {
  constexpr int N = opwright::kLanes<E>;
  const auto sum_over = [&](const auto& term) {
    Vec<E> sum{};
    for (int64_t i = 0; i < width; i += N) {
      const int count = static_cast<int>(width - i < N ? width - i : N);
      sum += first_lanes<E>(term(load(i, count)), count);
    }
    return sum_of_lanes(sum) / static_cast<E>(width);
  };
  const E mean = sum_over([](Vec<E> v) { return v; });
  const E variance = sum_over([&](Vec<E> v) { return (v - mean) * (v - mean); });
  return {mean, E(1) / static_cast<E>(__builtin_sqrt(variance + E(kNormEpsilon)))};
}
template <typename E>
RowMoments<E> moments_of_row(const E* row, int64_t width) {
  return moments_of<E>([row](int64_t i, int count) { return load_first(row + i, count); }, width);
}

// Calls body(row) for all compact rows.
template <typename Body>
void for_rows(int64_t rows, int64_t width, const Body& body) {
  parallel_for(rows, opwright::grain_of(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

// weight_ih @ x as compact rows of 4H; what the backward needs of its normalisation goes to `moments`.
template <typename E, typename O, typename T>
void add_inputs(E* to, const Schedule& schedule, const Arguments<T>& a, const Matrix<O>& x) {
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
    for (int64_t i = 0; i < width; ++i) values[i] = (values[i] - mean) * scale * static_cast<E>(a.norm_ih(i));
  });
}

// Zeros after the end of each entry.
template <typename T>
void clear_rest(const Schedule& schedule, View<T, 3> sequence) {
  if (schedule.is_full() || !sequence.numel()) return;
  for (int64_t t = 0; t < schedule.steps; ++t) {
    for (int64_t place = schedule.active(t); place < schedule.entries; ++place) {
      T* row = sequence.data() + t * sequence.stride(0) + schedule.entry(place) * sequence.stride(1);
      __builtin_memset(static_cast<void*>(row), 0, sequence.size(2) * sizeof(T));
    }
  }
}

template <typename E, typename T>
Sequence<E> sequence_of(View<T, 3> view) {
  return view.numel() ? Sequence<E>(view) : Sequence<E>();
}

}  // namespace

template <typename T>
void lstm(View<const T, 3> input, View<const T, 2> h_0, View<const T, 2> c_0, View<const T, 2> weight_ih,
          View<const T, 2> weight_hh, View<const T, 1> bias, View<const T, 2> weight_hr,
          View<const T, 2> peephole, View<const T, 1> norm_ih, View<const T, 1> norm_hh,
          View<const T, 2> norm_c, View<const T, 2> h_mask, View<const int64_t, 1> lengths,
          View<const bool, 2> reset, View<const int64_t, 1> seed, bool reverse, Activation activation,
          double slope, bool coupled, double clip, double zoneout_h, double zoneout_c, int64_t keep_cells,
          int64_t keep_gates, View<T, 3> output, View<T, 2> h_n, View<T, 2> c_n, View<T, 3> cells,
          View<T, 3> gates) {
  using E = opwright::compute_t<T>;
  using O = operand_t<T>;
  constexpr int N = opwright::kLanes<E>;
  const Arguments<T> a{input, h_0, c_0, weight_ih, weight_hh, bias, weight_hr, peephole,
                       norm_ih, norm_hh, norm_c, h_mask, lengths, reset, seed, reverse,
                       options_of<E>(activation, slope, coupled, clip, zoneout_h, zoneout_c, seed.defined())};
  a.check();
  const Schedule schedule(input.size(0), input.size(1), reverse, lengths);
  Parameters<E, O> layer;
  read_parameters<E>(layer, a);
  Forward<E, O> forward{schedule, layer};
  forward.output = Sequence<E>(output);
  forward.cells = sequence_of<E>(cells);
  forward.gates = sequence_of<E>(gates);
  clear_rest(schedule, output);
  clear_rest(schedule, cells);
  clear_rest(schedule, gates);

  Buffer<O> x_memory;
  Buffer<E> inputs;
  const Matrix<O> x = rows_of<O>(schedule, input, x_memory);
  const bool is_short = schedule.rows() <= kShortRows && !norm_c.defined() && is_rows<O>(weight_ih);
  E* from_input = nullptr;
  if constexpr (opwright::detail::kSame<E, T>) {
    // Each gate is written where its input is read.
    if (!is_short && schedule.is_full() && !norm_c.defined() && gates.numel()) from_input = gates.data();
  }
  if (!from_input && !is_short) {
    inputs.allocate(schedule.rows() * 4 * layer.H);
    from_input = inputs.data();
  }
  if (is_short) forward.x = x.data, forward.x_stride = x.row_stride, forward.ih_rows = gate_rows<O>(weight_ih);
  else add_inputs(from_input, schedule, a, x);
  if (norm_ih.defined()) normalise(from_input, schedule, a);
  forward.from_input = from_input;

  Buffer<O> hh_memory, hr_memory, hr_weight;
  if (is_rows<O>(weight_hh) && (schedule.entries <= kDotRows || schedule.steps <= kFewSteps)) {
    forward.hh_rows = gate_rows<O>(weight_hh);
  } else {
    pack_gates(forward.hh, hh_memory, weight_hh);
  }
  if (weight_hr.defined()) pack(forward.hr, hr_memory, weight_of<O>(weight_hr, hr_weight).transposed());

  const int members = team_size(a, layer.Hp / N);
  forward.allocate(members);
  for (int64_t place = 0; place < schedule.entries; ++place) {
    const int64_t entry = schedule.entry(place);
    const int64_t first = reverse ? schedule.length(place) - 1 : 0;
    const bool resets = first >= 0 && layer.resets(first, entry);
    for (int64_t u = 0; u < layer.H; ++u) forward.c[place * layer.Hp + u] = c_0(entry, u);
    for (int64_t u = 0; u < layer.R; ++u) {
      const T value = h_0(entry, u);
      if (forward.h.data()) forward.h[place * layer.Rp + u] = value;
      const E masked = resets ? E(0) : h_mask.defined() ? static_cast<E>(value) * static_cast<E>(h_mask(entry, u)) : static_cast<E>(value);
      for (auto& operand : forward.operand) operand[place * layer.Rp + u] = static_cast<O>(static_cast<E>(static_cast<T>(masked)));
    }
  }
  opwright::team(members, [&](const Member& member) {
    if (a.is_plain()) forward.template run<true>(member);
    else forward.template run<false>(member);
  });
  for (int64_t place = 0; place < schedule.entries; ++place) {
    const int64_t entry = schedule.entry(place), length = schedule.length(place);
    const int64_t last = reverse ? 0 : length - 1;
    for (int64_t u = 0; u < layer.R; ++u) h_n(entry, u) = length ? output(last, entry, u) : h_0(entry, u);
    for (int64_t u = 0; u < layer.H; ++u) c_n(entry, u) = static_cast<T>(forward.c[place * layer.Hp + u]);
  }
  (void)keep_cells, (void)keep_gates;
}
OPWRIGHT_KERNEL(lstm, float, double, opwright::half, opwright::bfloat16)

namespace {

// A gradient in the type of the operator, from sums or from products.
template <typename T, typename S>
void store_rows(View<T, 2> to, const S* from, int64_t padded) {
  for (int64_t row = 0; row < to.size(0); ++row) {
    for (int64_t column = 0; column < to.size(1); ++column) to(row, column) = static_cast<T>(from[row * padded + column]);
  }
}

// out = a b in the type of the operator.
template <typename T, typename O>
void multiply_into(View<T, 2> out, const Matrix<O>& a, const Matrix<O>& b) {
  if constexpr (opwright::detail::kSame<T, O>) {
    multiply(Matrix<O>(out), a, b);
  } else {
    Buffer<O> memory(a.rows * b.columns);
    multiply(Matrix<O>(memory.data(), a.rows, b.columns, b.columns), a, b);
    for_rows(a.rows, b.columns, [&](int64_t row) {
      for (int64_t i = 0; i < b.columns; ++i) out(row, i) = static_cast<T>(memory[row * b.columns + i]);
    });
  }
}

// The columns of two matrices.
template <typename O>
Matrix<O> side_by_side(const Matrix<O>& a, const Matrix<O>& b, Buffer<O>& memory) {
  const int64_t width = a.columns + b.columns, padded = round_up(width, kPair<O>);
  memory.allocate(a.rows * padded);
  for_rows(a.rows, width, [&](int64_t row) {
    O* to = &memory[row * padded];
    for (int64_t i = 0; i < a.columns; ++i) *to++ = a(row, i);
    for (int64_t i = 0; i < b.columns; ++i) *to++ = b(row, i);
    if (padded > width) *to = O(0.0f);
  });
  return Matrix<O>(memory.data(), a.rows, width, padded);
}

// A copy whose last axis has no gaps, if need be: gradients often come expanded.
template <typename T>
View<const T, 3> dense(View<const T, 3> view, Buffer<T>& memory) {
  if (view.stride(2) == 1 || view.size(2) == 1) return view;
  const int64_t B = view.size(1), width = view.size(2);
  memory.allocate(view.size(0) * B * width);
  for_rows(view.size(0), B * width, [&](int64_t t) {
    for (int64_t e = 0; e < B; ++e) {
      for (int64_t i = 0; i < width; ++i) memory[(t * B + e) * width + i] = view(t, e, i);
    }
  });
  return {memory.data(), {view.size(0), B, width}, {B * width, width, 1}};
}

}  // namespace

template <typename T>
void lstm_backward(View<const T, 3> grad_output, View<const T, 2> grad_h_n, View<const T, 2> grad_c_n,
                   View<const T, 3> grad_cells, View<const T, 3> input, View<const T, 2> h_0,
                   View<const T, 2> c_0, View<const T, 2> weight_ih, View<const T, 2> weight_hh,
                   View<const T, 1> bias, View<const T, 2> weight_hr, View<const T, 2> peephole,
                   View<const T, 1> norm_ih, View<const T, 1> norm_hh, View<const T, 2> norm_c,
                   View<const T, 2> h_mask, View<const int64_t, 1> lengths, View<const bool, 2> reset,
                   View<const int64_t, 1> seed, View<const T, 3> output, View<const T, 3> gates,
                   bool reverse, Activation activation, double slope, bool coupled, double clip,
                   double zoneout_h, double zoneout_c, int64_t keep_cells, int64_t keep_gates,
                   View<T, 3> grad_input, View<T, 2> grad_h_0, View<T, 2> grad_c_0,
                   View<T, 2> grad_weight_ih, View<T, 2> grad_weight_hh, View<T, 1> grad_bias,
                   View<T, 2> grad_weight_hr, View<T, 2> grad_peephole, View<T, 1> grad_norm_ih,
                   View<T, 1> grad_norm_hh, View<T, 2> grad_norm_c, View<T, 2> grad_h_mask) {
  using E = opwright::compute_t<T>;
  using O = operand_t<T>;
  constexpr int N = opwright::kLanes<E>;
  const Arguments<T> a{input, h_0, c_0, weight_ih, weight_hh, bias, weight_hr, peephole,
                       norm_ih, norm_hh, norm_c, h_mask, lengths, reset, seed, reverse,
                       options_of<E>(activation, slope, coupled, clip, zoneout_h, zoneout_c, seed.defined())};
  a.check();
  const Schedule schedule(input.size(0), input.size(1), reverse, lengths);
  Parameters<E, O> layer;
  read_parameters<E>(layer, a);
  const int64_t rows = schedule.rows(), H = layer.H, R = layer.R, width = 4 * H;

  Backward<E, O> sweep{schedule, layer};
  Buffer<T> grad_output_memory, grad_cells_memory, output_memory, h_0_memory;
  sweep.grad_output = Sequence<E>(dense(grad_output, grad_output_memory));
  if (grad_cells.numel()) sweep.grad_cells = Sequence<E>(dense(grad_cells, grad_cells_memory));
  sweep.output = Sequence<E>(dense(output, output_memory));
  sweep.h_0 = Sequence<E>(dense(View<const T, 3>{h_0.data(), {1, h_0.size(0), R}, {0, h_0.stride(0), h_0.stride(1)}}, h_0_memory));

  // h before each step, as products take it.
  Buffer<O> h_memory(rows * layer.Rp);
  for_rows(schedule.steps, schedule.entries * R, [&](int64_t t) {
    for (int64_t place = 0; place < schedule.active(t); ++place) {
      for (int64_t column = 0; column < layer.Rp; column += N) {
        opwright::store(&h_memory[(schedule.first_row(t) + place) * layer.Rp + column],
                        sweep.operand_before(t, place, column));
      }
    }
  });
  const Matrix<O> h_rows(h_memory.data(), rows, R, layer.Rp);

  Buffer<O> x_memory, ih_memory, hh_memory, hr_memory;
  const Matrix<O> x = rows_of<O>(schedule, input, x_memory);
  const Matrix<O> ih = weight_of<O>(weight_ih, ih_memory), hh = weight_of<O>(weight_hh, hh_memory);

  // The gates before their activations, and the rows that were normalised.
  Buffer<E> computed, from_input, from_h, gain_x;
  Buffer<RowMoments<E>> moments_x;
  if (norm_c.defined()) {
    from_input.allocate(rows * width);
    computed.allocate(rows * width);
    moments_x.allocate(rows);
    gain_x.allocate(width);
    for (int64_t i = 0; i < width; ++i) gain_x[i] = static_cast<E>(norm_ih(i));
    sweep.moments_h.allocate(rows);
    multiply(Matrix<E>(from_input.data(), rows, width, width), x, ih.transposed());
    if (gates.numel()) {
      sweep.saved = Sequence<E>(gates);
    } else {
      from_h.allocate(rows * width);
      multiply(Matrix<E>(from_h.data(), rows, width, width), h_rows, hh.transposed());
    }
    sweep.from_h = from_h.data();
    for_rows(schedule.steps, schedule.entries * width, [&](int64_t t) {
      for (int64_t place = 0; place < schedule.active(t); ++place) {
        const int64_t row = schedule.first_row(t) + place;
        const auto of_x = moments_x[row] = moments_of_row<E>(&from_input[row * width], width);
        const auto load_h = [&](int64_t i, int count) { return sweep.load_from_h(t, place, i, count); };
        const auto of_h = sweep.moments_h[row] = moments_of<E>(load_h, width);
        for (int64_t j = 0; j < 4; ++j) {
          for (int64_t u = 0; u < H; u += N) {
            const int count = static_cast<int>(H - u < N ? H - u : N);
            const int64_t i = j * H + u;
            const Vec<E> x_unit = (load_first(&from_input[row * width + i], count) - of_x.mean) * of_x.scale;
            const Vec<E> h_unit = (load_h(i, count) - of_h.mean) * of_h.scale;
            Vec<E> z = opwright::fma(x_unit, load_first(&gain_x[i], count), opwright::load(&layer.bias[j * layer.Hp + u]));
            z = opwright::fma(h_unit, opwright::load(&layer.norm_hh[j * layer.Hp + u]), z);
            store_first(&computed[row * width + i], z, count);
          }
        }
      }
    });
  } else if (!gates.numel()) {
    // One product for both: [x h] with [weight_ih weight_hh].
    computed.allocate(rows * width);
    Buffer<O> operands, weights;
    multiply(Matrix<E>(computed.data(), rows, width, width), side_by_side(x, h_rows, operands),
             side_by_side(ih, hh, weights).transposed());
    for_rows(rows, width, [&](int64_t row) {
      for (int64_t j = 0; j < 4; ++j) {
        for (int64_t u = 0; u < H; ++u) computed[row * width + j * H + u] += layer.bias[j * layer.Hp + u];
      }
    });
  } else {
    sweep.saved = Sequence<E>(gates);
  }
  sweep.computed = computed.data();

  Buffer<O> hh_panels, hr_panels;
  pack(sweep.hh, hh_panels, hh);
  if (weight_hr.defined()) pack(sweep.hr, hr_panels, weight_of<O>(weight_hr, hr_memory));
  const int members = team_size(a, sweep.hh.count);
  sweep.allocate(members);

  Buffer<E> c;
  c.allocate_zeros(schedule.entries * layer.Hp);
  for (int64_t place = 0; place < schedule.entries; ++place) {
    const int64_t entry = schedule.entry(place);
    for (int64_t u = 0; u < H; ++u) {
      c[place * layer.Hp + u] = c_0(entry, u);
      sweep.grad_c[place * layer.Hp + u] = grad_c_n(entry, u);
    }
    for (int64_t u = 0; u < R; ++u) sweep.grad_h[place * layer.Rp + u] = grad_h_n(entry, u);
  }
  const bool is_plain = a.is_plain() && !grad_cells.numel();
  parallel_for(layer.Hp / N, opwright::grain_of(rows * N), [&](int64_t begin, int64_t end) {
    if (is_plain) sweep.template scan<true>(begin, end, c);
    else sweep.template scan<false>(begin, end, c);
  });
  if (norm_c.defined()) {
    const Options<E>& options = layer.options;
    const Activations<false, E> act{options};
    for_rows(schedule.steps, schedule.entries * H, [&](int64_t t) {
      Buffer<E> cell(layer.Hp);
      for (int64_t place = 0; place < schedule.active(t); ++place) {
        const int64_t row = schedule.first_row(t) + place;
        for (int64_t column = 0; column < layer.Hp; column += N) {
          Vec<E> z[4];
          sweep.load_gates(t, place, column, z);
          const Vec<E> i = act.sigmoid(z[0]);
          const Vec<E> f = options.is_coupled ? 1 - i : act.sigmoid(z[1]);
          opwright::store(&cell[column], opwright::fma(f, opwright::load(&sweep.before_c[row * layer.Hp + column]),
                                                       i * act.tanh(act.clipped(z[2]))));
        }
        sweep.moments_c[row] = moments_of_row<E>(cell.data(), H);
      }
    });
  }

  opwright::team(members, [&](const Member& member) {
    if (is_plain) sweep.template run<true>(member);
    else sweep.template run<false>(member);
  });

  // The products that need all steps.
  const Matrix<O> grad_rows(sweep.grad_gates.data(), rows, width, width);
  multiply_into(grad_weight_hh, grad_rows.transposed(), h_rows);
  if (weight_hr.defined()) {
    multiply_into(grad_weight_hr, Matrix<O>(sweep.grad_projected.data(), rows, R, layer.Rp).transposed(),
                  Matrix<O>(sweep.projected.data(), rows, H, layer.Hp));
  }
  if (norm_c.defined()) {
    // Back through the normalisation of the inputs; grad_gates takes their gradient.
    for_rows(rows, width, [&](int64_t row) {
      const auto [mean, scale] = moments_x[row];
      E* values = &from_input[row * width];
      const E* grad = &computed[row * width];
      Vec<E> first{}, second{};
      for (int64_t i = 0; i < width; i += N) {
        const int count = static_cast<int>(width - i < N ? width - i : N);
        const Vec<E> unit = (load_first(values + i, count) - mean) * scale;
        const Vec<E> to_unit = load_first(grad + i, count) * load_first(&gain_x[i], count);
        store_first(values + i, unit, count);
        first += to_unit;
        second = opwright::fma(to_unit, unit, second);
      }
      const E mean_grad = sum_of_lanes(first) / width, mean_product = sum_of_lanes(second) / width;
      for (int64_t i = 0; i < width; ++i) {
        const E to_unit = grad[i] * gain_x[i];
        sweep.grad_gates[row * width + i] = static_cast<O>((to_unit - mean_grad - values[i] * mean_product) * scale);
      }
    });
    parallel_for(width, opwright::grain_of(rows), [&](int64_t begin, int64_t end) {
      Buffer<E> sums;
      sums.allocate_zeros(end - begin);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = begin; i < end; ++i) sums[i - begin] += computed[row * width + i] * from_input[row * width + i];
      }
      for (int64_t i = begin; i < end; ++i) grad_norm_ih(i) = static_cast<T>(sums[i - begin]);
    });
    for (int64_t i = 0; i < width; ++i) {
      grad_norm_hh(i) = static_cast<T>(sweep.grad_norm_hh[i / H * layer.Hp + i % H]);
    }
    store_rows(grad_norm_c, sweep.grad_norm_c.data(), layer.Hp);
  }
  multiply_into(grad_weight_ih, grad_rows.transposed(), x);
  if (schedule.is_full() && grad_input.is_contiguous()) {
    multiply_into(View<T, 2>{grad_input.data(), {rows, input.size(2)}, {input.size(2), 1}}, grad_rows, ih);
  } else {
    const int64_t I = input.size(2);
    Buffer<O> found(rows * I);
    multiply(Matrix<O>(found.data(), rows, I, I), grad_rows, ih);
    for_rows(schedule.steps, schedule.entries * I, [&](int64_t t) {
      for (int64_t place = 0; place < schedule.entries; ++place) {
        const bool is_active = place < schedule.active(t);
        const O* from = &found[(schedule.first_row(t) + place) * I];
        for (int64_t i = 0; i < I; ++i) {
          grad_input(t, schedule.entry(place), i) = is_active ? static_cast<T>(static_cast<E>(from[i])) : T(0.0f);
        }
      }
    });
  }
  if (bias.defined()) {
    for (int64_t i = 0; i < width; ++i) grad_bias(i) = static_cast<T>(sweep.grad_bias[i / H * layer.Hp + i % H]);
  }
  if (peephole.defined()) store_rows(grad_peephole, sweep.grad_peephole.data(), layer.Hp);
  for (int64_t place = 0; place < schedule.entries; ++place) {
    const int64_t entry = schedule.entry(place);
    for (int64_t u = 0; u < R; ++u) {
      grad_h_0(entry, u) = static_cast<T>(sweep.grad_h[place * layer.Rp + u]);
      if (h_mask.defined()) grad_h_mask(entry, u) = static_cast<T>(sweep.grad_mask[place * layer.Rp + u]);
    }
    for (int64_t u = 0; u < H; ++u) grad_c_0(entry, u) = static_cast<T>(sweep.grad_c[place * layer.Hp + u]);
  }
  (void)keep_cells, (void)keep_gates;
}
OPWRIGHT_KERNEL(lstm_backward, float, double, opwright::half, opwright::bfloat16)
