// An LSTM over a sequence: one product for the inputs of all steps, then a team of threads that
// takes the steps together, each its own units, with weights packed for the call. NOTES.md has the
// measurements.
#include "backward.h"
#include "call.h"

using namespace opwright_ops;

namespace {

// More rows than steps would be left as they are.
void check_kept(int64_t keep_cells, int64_t keep_gates) {
  opwright::check((keep_cells | keep_gates) >> 1 == 0,
                  "`keep_cells` and `keep_gates` must be 0 or 1");
}

}  // namespace

template <typename T>
void lstm(View<const T, 3> input, View<const T, 2> h_0, View<const T, 2> c_0,
          View<const T, 2> weight_ih, View<const T, 2> weight_hh, View<const T, 1> bias_ih,
          View<const T, 1> bias_hh, View<const T, 2> weight_hr, View<const T, 2> peephole,
          View<const T, 1> norm_ih, View<const T, 1> norm_hh, View<const T, 2> norm_c,
          View<const T, 2> h_mask, View<const int64_t, 1> lengths, View<const bool, 2> reset,
          View<const int64_t, 1> seed, bool reverse, Activation activation, double slope,
          bool coupled, double clip, double zoneout_h, double zoneout_c, int64_t keep_cells,
          int64_t keep_gates, Tier tier, Fp32Precision precision, View<T, 3> output, View<T, 2> h_n,
          View<T, 2> c_n, View<T, 3> cells, View<T, 3> gates) {
  using E = opwright::compute_t<T>;
  using O = operand_t<T>;
  constexpr int N = opwright::kLanes<E>;
  const Arguments<T> a{
      input,
      h_0,
      c_0,
      weight_ih,
      weight_hh,
      bias_ih,
      bias_hh,
      weight_hr,
      peephole,
      norm_ih,
      norm_hh,
      norm_c,
      h_mask,
      lengths,
      reset,
      seed,
      reverse,
      options_of<E>(activation, slope, coupled, clip, zoneout_h, zoneout_c, seed.defined())};
  a.check();
  check_kept(keep_cells, keep_gates);
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

  Buffer<O> x_memory, ih_memory, hh_memory, hr_memory, hr_weight;
  Buffer<E> inputs;
  if (is_rows<O>(weight_hh) && !packing_pays<O>(schedule, weight_hh.numel())) {
    forward.hh_rows = gate_rows<O>(weight_hh);
  } else {
    pack_gates(forward.hh, hh_memory, weight_hh);
  }
  const Matrix<O> x = rows_of<O>(schedule, input, x_memory);
  forward.x = x.data, forward.x_stride = x.row_stride;
  if (schedule.rows() <= kShortRows && !norm_c.defined() && is_rows<O>(weight_ih)) {
    forward.ih_rows = gate_rows<O>(weight_ih);
  } else if (kByPanels<E, O> && forward.hh.data && !norm_c.defined()) {
    pack_gates(forward.ih, ih_memory, weight_ih);
  } else {
    E* from_input = nullptr;
    if constexpr (opwright::detail::kSame<E, T>) {
      // Each gate is written where its input is read.
      if (schedule.is_full() && !norm_c.defined() && gates.numel()) from_input = gates.data();
    }
    if (!from_input) {
      inputs.allocate(schedule.rows() * 4 * layer.H);
      from_input = inputs.data();
    }
    multiply_inputs(from_input, schedule, a, x);
    if (norm_ih.defined()) normalise(from_input, schedule, a);
    forward.from_input = from_input;
  }
  if (weight_hr.defined())
    pack(forward.hr, hr_memory, weight_of<O>(weight_hr, hr_weight).transposed());

  const int members = team_size(a, layer.Hp / N);
  forward.allocate();
  start(forward, h_0, c_0, h_mask);
  opwright::team(members, [&](const Member& member) {
    if (a.is_plain())
      forward.template run<true>(member);
    else
      forward.template run<false>(member);
  });
  finish(forward, h_0, output, h_n, c_n);
  (void)tier, (void)precision;
}
OPWRIGHT_KERNEL(lstm, float, double, opwright::half, opwright::bfloat16)

namespace {

// A gradient in the type of the operator, from sums or from products.
template <typename T, typename S>
void store_rows(View<T, 2> to, const S* from, int64_t padded) {
  for (int64_t row = 0; row < to.size(0); ++row) {
    for (int64_t column = 0; column < to.size(1); ++column)
      to(row, column) = static_cast<T>(from[row * padded + column]);
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
      for (int64_t i = 0; i < b.columns; ++i)
        out(row, i) = static_cast<T>(memory[row * b.columns + i]);
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
void lstm_backward(View<const T, 3> grad_output, View<const T, 2> grad_h_n,
                   View<const T, 2> grad_c_n, View<const T, 3> grad_cells, View<const T, 3> input,
                   View<const T, 2> h_0, View<const T, 2> c_0, View<const T, 2> weight_ih,
                   View<const T, 2> weight_hh, View<const T, 1> bias_ih, View<const T, 1> bias_hh,
                   View<const T, 2> weight_hr, View<const T, 2> peephole, View<const T, 1> norm_ih,
                   View<const T, 1> norm_hh, View<const T, 2> norm_c, View<const T, 2> h_mask,
                   View<const int64_t, 1> lengths, View<const bool, 2> reset,
                   View<const int64_t, 1> seed, View<const T, 3> output, View<const T, 3> gates,
                   bool reverse, Activation activation, double slope, bool coupled, double clip,
                   double zoneout_h, double zoneout_c, int64_t keep_cells, int64_t keep_gates,
                   Tier tier, Fp32Precision precision, View<T, 3> grad_input, View<T, 2> grad_h_0,
                   View<T, 2> grad_c_0, View<T, 2> grad_weight_ih, View<T, 2> grad_weight_hh,
                   View<T, 1> grad_bias_ih, View<T, 1> grad_bias_hh, View<T, 2> grad_weight_hr,
                   View<T, 2> grad_peephole, View<T, 1> grad_norm_ih, View<T, 1> grad_norm_hh,
                   View<T, 2> grad_norm_c, View<T, 2> grad_h_mask) {
  using E = opwright::compute_t<T>;
  using O = operand_t<T>;
  constexpr int N = opwright::kLanes<E>;
  const Arguments<T> a{
      input,
      h_0,
      c_0,
      weight_ih,
      weight_hh,
      bias_ih,
      bias_hh,
      weight_hr,
      peephole,
      norm_ih,
      norm_hh,
      norm_c,
      h_mask,
      lengths,
      reset,
      seed,
      reverse,
      options_of<E>(activation, slope, coupled, clip, zoneout_h, zoneout_c, seed.defined())};
  a.check();
  check_kept(keep_cells, keep_gates);
  const Schedule schedule(input.size(0), input.size(1), reverse, lengths);
  Parameters<E, O> layer;
  read_parameters<E>(layer, a);
  const int64_t rows = schedule.rows(), H = layer.H, R = layer.R, width = 4 * H;

  Backward<E, O> sweep{schedule, layer};
  Buffer<T> grad_output_memory, grad_cells_memory, output_memory, h_0_memory, gates_memory;
  sweep.grad_output = Sequence<E>(dense(grad_output, grad_output_memory));
  if (grad_cells.numel()) sweep.grad_cells = Sequence<E>(dense(grad_cells, grad_cells_memory));
  sweep.output = Sequence<E>(dense(output, output_memory));
  if (h_0.defined()) {
    const View<const T, 3> one_step{
        h_0.data(), {1, h_0.size(0), R}, {0, h_0.stride(0), h_0.stride(1)}};
    sweep.h_0 = Sequence<E>(dense(one_step, h_0_memory));
  }

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
      sweep.saved = Sequence<E>(dense(gates, gates_memory));
    } else {
      from_h.allocate(rows * width);
      multiply(Matrix<E>(from_h.data(), rows, width, width), h_rows, hh.transposed());
    }
    sweep.from_h = from_h.data();
    for_rows(schedule.steps, schedule.entries * width, [&](int64_t t) {
      for (int64_t place = 0; place < schedule.active(t); ++place) {
        const int64_t row = schedule.first_row(t) + place;
        const auto of_x = moments_x[row] = moments_of_row<E>(&from_input[row * width], width);
        const auto load_h = [&](int64_t i, int count) {
          return sweep.load_from_h(t, place, i, count);
        };
        const auto of_h = sweep.moments_h[row] = moments_of<E>(load_h, width);
        for (int64_t j = 0; j < 4; ++j) {
          for (int64_t u = 0; u < H; u += N) {
            const int count = static_cast<int>(H - u < N ? H - u : N);
            const int64_t i = j * H + u;
            const Vec<E> x_unit =
                (load_first(&from_input[row * width + i], count) - of_x.mean) * of_x.scale;
            const Vec<E> h_unit = (load_h(i, count) - of_h.mean) * of_h.scale;
            Vec<E> z = opwright::fma(x_unit, load_first(&gain_x[i], count),
                                     opwright::load(&layer.bias[j * layer.Hp + u]));
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
        for (int64_t u = 0; u < H; ++u)
          computed[row * width + j * H + u] += layer.bias[j * layer.Hp + u];
      }
    });
  } else {
    sweep.saved = Sequence<E>(dense(gates, gates_memory));
  }
  sweep.computed = computed.data();

  Buffer<O> hh_panels, hr_panels;
  pack(sweep.hh, hh_panels, hh);
  if (weight_hr.defined()) pack(sweep.hr, hr_panels, weight_of<O>(weight_hr, hr_memory));
  const int members = team_size(a, sweep.hh.count);
  sweep.allocate();

  Buffer<E> c;
  c.allocate_zeros(schedule.entries * layer.Hp);
  for (int64_t place = 0; place < schedule.entries; ++place) {
    const int64_t entry = schedule.entry(place);
    for (int64_t u = 0; u < H; ++u) {
      if (c_0.defined()) c[place * layer.Hp + u] = c_0(entry, u);
      sweep.grad_c[place * layer.Hp + u] = grad_c_n(entry, u);
    }
    for (int64_t u = 0; u < R; ++u) sweep.grad_h[place * layer.Rp + u] = grad_h_n(entry, u);
  }
  const bool is_plain = a.is_plain() && !grad_cells.numel();
  parallel_for(layer.Hp / N, opwright::grain_of(rows * N), [&](int64_t begin, int64_t end) {
    if (is_plain)
      sweep.template scan<true>(begin, end, c);
    else
      sweep.template scan<false>(begin, end, c);
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
          opwright::store(&cell[column],
                          opwright::fma(f, opwright::load(&sweep.before_c[row * layer.Hp + column]),
                                        i * act.tanh(act.clipped(z[2]))));
        }
        sweep.moments_c[row] = moments_of_row<E>(cell.data(), H);
      }
    });
  }

  opwright::team(members, [&](const Member& member) {
    if (is_plain)
      sweep.template run<true>(member);
    else
      sweep.template run<false>(member);
  });

  // The products that need all steps.
  const Matrix<O> grad_rows(sweep.grad_gates.data(), rows, width, width);
  multiply_into(grad_weight_hh, grad_rows.transposed(), h_rows);
  if (weight_hr.defined()) {
    multiply_into(grad_weight_hr,
                  Matrix<O>(sweep.grad_projected.data(), rows, R, layer.Rp).transposed(),
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
        sweep.grad_gates[row * width + i] =
            static_cast<O>((to_unit - mean_grad - values[i] * mean_product) * scale);
      }
    });
    parallel_for(width, opwright::grain_of(rows), [&](int64_t begin, int64_t end) {
      Buffer<E> sums;
      sums.allocate_zeros(end - begin);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = begin; i < end; ++i)
          sums[i - begin] += computed[row * width + i] * from_input[row * width + i];
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
    multiply_into(View<T, 2>{grad_input.data(), {rows, input.size(2)}, {input.size(2), 1}},
                  grad_rows, ih);
  } else {
    const int64_t I = input.size(2);
    Buffer<O> found(rows * I);
    multiply(Matrix<O>(found.data(), rows, I, I), grad_rows, ih);
    for_rows(schedule.steps, schedule.entries * I, [&](int64_t t) {
      for (int64_t place = 0; place < schedule.entries; ++place) {
        const bool is_active = place < schedule.active(t);
        const O* from = &found[(schedule.first_row(t) + place) * I];
        for (int64_t i = 0; i < I; ++i) {
          grad_input(t, schedule.entry(place), i) =
              is_active ? static_cast<T>(static_cast<E>(from[i])) : T(0.0f);
        }
      }
    });
  }
  for (const View<T, 1>& grad_bias : {grad_bias_ih, grad_bias_hh}) {
    // An empty one is of a bias that is not there.
    for (int64_t i = 0; i < grad_bias.size(0); ++i) {
      grad_bias(i) = static_cast<T>(sweep.grad_bias[i / H * layer.Hp + i % H]);
    }
  }
  if (peephole.defined()) store_rows(grad_peephole, sweep.grad_peephole.data(), layer.Hp);
  for (int64_t place = 0; place < schedule.entries; ++place) {
    const int64_t entry = schedule.entry(place);
    for (int64_t u = 0; u < R; ++u) {
      if (h_0.defined()) grad_h_0(entry, u) = static_cast<T>(sweep.grad_h[place * layer.Rp + u]);
      if (h_mask.defined())
        grad_h_mask(entry, u) = static_cast<T>(sweep.grad_mask[place * layer.Rp + u]);
    }
    for (int64_t u = 0; c_0.defined() && u < H; ++u) {
      grad_c_0(entry, u) = static_cast<T>(sweep.grad_c[place * layer.Hp + u]);
    }
  }
  (void)tier, (void)precision;
}
OPWRIGHT_KERNEL(lstm_backward, float, double, opwright::half, opwright::bfloat16)

namespace {

// What each direction has of its own: the one at this index of the first axis. What is absent stays
// so.
template <typename T, int kRank>
View<T, kRank - 1> at(View<T, kRank> both, int direction) {
  View<T, kRank - 1> one{};
  if (!both.defined()) return one;
  one.data_ = both.data() + direction * both.stride(0);
  for (int axis = 1; axis < kRank; ++axis) {
    one.sizes_[axis - 1] = both.size(axis), one.strides_[axis - 1] = both.stride(axis);
  }
  return one;
}

// The columns of one direction, where those of both lie side by side.
template <typename T>
View<T, 3> side(View<T, 3> both, int direction) {
  View<T, 3> one = both;
  one.sizes_[2] /= 2;
  if (both.defined()) one.data_ += direction * one.sizes_[2] * both.stride(2);
  return one;
}

// Calls body(direction) for both: each on a thread of its own where a team would be of two at most,
// and where the weights of one stay in the cache of one core.
template <typename T, typename Body>
void for_directions(View<const T, 3> input, View<const T, 2> weight_hh, const Body& body) {
  const int64_t work = weight_hh.numel() * input.size(1);
  const int64_t bytes = weight_hh.numel() * int64_t{sizeof(operand_t<T>)};
  const bool at_once =
      bytes <= kCoreCache && (opwright::num_threads() == 2 || work < 3 * kWorkPerThread);
  parallel_for(2, at_once ? 1 : 2, [&](int64_t begin, int64_t end) {
    for (int64_t direction = begin; direction < end; ++direction) body(static_cast<int>(direction));
  });
}

}  // namespace

template <typename T>
void lstm_bidirectional(
    View<const T, 3> input, View<const T, 3> h_0, View<const T, 3> c_0, View<const T, 2> weight_ih,
    View<const T, 2> weight_hh, View<const T, 1> bias_ih, View<const T, 1> bias_hh,
    View<const T, 2> weight_hr, View<const T, 2> peephole, View<const T, 1> norm_ih,
    View<const T, 1> norm_hh, View<const T, 2> norm_c, View<const T, 2> weight_ih_reverse,
    View<const T, 2> weight_hh_reverse, View<const T, 1> bias_ih_reverse,
    View<const T, 1> bias_hh_reverse, View<const T, 2> weight_hr_reverse,
    View<const T, 2> peephole_reverse, View<const T, 1> norm_ih_reverse,
    View<const T, 1> norm_hh_reverse, View<const T, 2> norm_c_reverse, View<const T, 3> h_mask,
    View<const int64_t, 1> lengths, View<const bool, 3> reset, View<const int64_t, 2> seed,
    Activation activation, double slope, bool coupled, double clip, double zoneout_h,
    double zoneout_c, int64_t keep_cells, int64_t keep_gates, Tier tier, Fp32Precision precision,
    View<T, 3> output, View<T, 3> h_n, View<T, 3> c_n, View<T, 3> cells, View<T, 4> gates) {
  for_directions(input, weight_hh, [&](int d) {
    const auto of = [d](auto one, auto other) { return d ? other : one; };
    lstm<T>(input, at(h_0, d), at(c_0, d), of(weight_ih, weight_ih_reverse),
            of(weight_hh, weight_hh_reverse), of(bias_ih, bias_ih_reverse),
            of(bias_hh, bias_hh_reverse), of(weight_hr, weight_hr_reverse),
            of(peephole, peephole_reverse), of(norm_ih, norm_ih_reverse),
            of(norm_hh, norm_hh_reverse), of(norm_c, norm_c_reverse), at(h_mask, d), lengths,
            at(reset, d), at(seed, d), d == 1, activation, slope, coupled, clip, zoneout_h,
            zoneout_c, keep_cells, keep_gates, tier, precision, side(output, d), at(h_n, d),
            at(c_n, d), side(cells, d), at(gates, d));
  });
}
OPWRIGHT_KERNEL(lstm_bidirectional, float, double, opwright::half, opwright::bfloat16)

template <typename T>
void lstm_bidirectional_backward(
    View<const T, 3> grad_output, View<const T, 3> grad_h_n, View<const T, 3> grad_c_n,
    View<const T, 3> grad_cells, View<const T, 3> input, View<const T, 3> h_0, View<const T, 3> c_0,
    View<const T, 2> weight_ih, View<const T, 2> weight_hh, View<const T, 1> bias_ih,
    View<const T, 1> bias_hh, View<const T, 2> weight_hr, View<const T, 2> peephole,
    View<const T, 1> norm_ih, View<const T, 1> norm_hh, View<const T, 2> norm_c,
    View<const T, 2> weight_ih_reverse, View<const T, 2> weight_hh_reverse,
    View<const T, 1> bias_ih_reverse, View<const T, 1> bias_hh_reverse,
    View<const T, 2> weight_hr_reverse, View<const T, 2> peephole_reverse,
    View<const T, 1> norm_ih_reverse, View<const T, 1> norm_hh_reverse,
    View<const T, 2> norm_c_reverse, View<const T, 3> h_mask, View<const int64_t, 1> lengths,
    View<const bool, 3> reset, View<const int64_t, 2> seed, View<const T, 3> output,
    View<const T, 4> gates, Activation activation, double slope, bool coupled, double clip,
    double zoneout_h, double zoneout_c, int64_t keep_cells, int64_t keep_gates, Tier tier,
    Fp32Precision precision, View<T, 3> grad_input, View<T, 3> grad_h_0, View<T, 3> grad_c_0,
    View<T, 2> grad_weight_ih, View<T, 2> grad_weight_hh, View<T, 1> grad_bias_ih,
    View<T, 1> grad_bias_hh, View<T, 2> grad_weight_hr, View<T, 2> grad_peephole,
    View<T, 1> grad_norm_ih, View<T, 1> grad_norm_hh, View<T, 2> grad_norm_c,
    View<T, 2> grad_weight_ih_reverse, View<T, 2> grad_weight_hh_reverse,
    View<T, 1> grad_bias_ih_reverse, View<T, 1> grad_bias_hh_reverse,
    View<T, 2> grad_weight_hr_reverse, View<T, 2> grad_peephole_reverse,
    View<T, 1> grad_norm_ih_reverse, View<T, 1> grad_norm_hh_reverse,
    View<T, 2> grad_norm_c_reverse, View<T, 3> grad_h_mask) {
  using E = opwright::compute_t<T>;
  // Each direction has a gradient of the input; their sum counts.
  Buffer<T> memory(grad_input.numel());
  View<T, 3> grad_input_reverse = grad_input;
  grad_input_reverse.data_ = memory.data();
  for_directions(input, weight_hh, [&](int d) {
    const auto of = [d](auto one, auto other) { return d ? other : one; };
    lstm_backward<T>(
        side(grad_output, d), at(grad_h_n, d), at(grad_c_n, d), side(grad_cells, d), input,
        at(h_0, d), at(c_0, d), of(weight_ih, weight_ih_reverse), of(weight_hh, weight_hh_reverse),
        of(bias_ih, bias_ih_reverse), of(bias_hh, bias_hh_reverse),
        of(weight_hr, weight_hr_reverse), of(peephole, peephole_reverse),
        of(norm_ih, norm_ih_reverse), of(norm_hh, norm_hh_reverse), of(norm_c, norm_c_reverse),
        at(h_mask, d), lengths, at(reset, d), at(seed, d), side(output, d), at(gates, d), d == 1,
        activation, slope, coupled, clip, zoneout_h, zoneout_c, keep_cells, keep_gates, tier,
        precision, of(grad_input, grad_input_reverse), at(grad_h_0, d), at(grad_c_0, d),
        of(grad_weight_ih, grad_weight_ih_reverse), of(grad_weight_hh, grad_weight_hh_reverse),
        of(grad_bias_ih, grad_bias_ih_reverse), of(grad_bias_hh, grad_bias_hh_reverse),
        of(grad_weight_hr, grad_weight_hr_reverse), of(grad_peephole, grad_peephole_reverse),
        of(grad_norm_ih, grad_norm_ih_reverse), of(grad_norm_hh, grad_norm_hh_reverse),
        of(grad_norm_c, grad_norm_c_reverse), at(grad_h_mask, d));
  });
  parallel_for(grad_input.numel(), opwright::grain_of(1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const E sum = static_cast<E>(grad_input.data()[i]) + static_cast<E>(memory[i]);
      grad_input.data()[i] = static_cast<T>(sum);
    }
  });
}
OPWRIGHT_KERNEL(lstm_bidirectional_backward, float, double, opwright::half, opwright::bfloat16)
