// The steps of a sequence: gates, cells, h.
#pragma once

#include "dots.h"
#include "norm.h"
#include "prepared.h"

namespace opwright_ops {

using opwright::fma;

// A part of the panels or registers that one member of a team works on.
struct Share {
  int64_t begin, end;
  Share(int64_t count, const Member& member)
      : begin(count * member.id() / member.count()),
        end(count * (member.id() + 1) / member.count()) {}

  // Calls body(panel, next) for all, at odd turns from the last: what was read last is still in the
  // cache.
  template <typename Body>
  void for_panels(int64_t turn, const Body& body) const {
    const int64_t step = turn % 2 ? -1 : 1;
    int64_t panel = turn % 2 ? end - 1 : begin;
    for (int64_t left = end - begin; left > 0; --left, panel += step)
      body(panel, left > 1 ? panel + step : panel);
  }
};

// A layer's parameters, widths rounded up to whole registers: Hp of cells, Rp of h. What is beyond
// the widths themselves is 0. Absent ones are null.
template <typename E, typename O>
struct Parameters {
  int64_t H, R, Hp, Rp;
  Options<E> options;
  Buffer<E> bias, peephole;   // [4, Hp], [3, Hp]
  Buffer<E> norm_hh, norm_c;  // [4, Hp], [2, Hp]
  Buffer<E> mask;             // [B, Rp], behind h_mask
  Sequence<E> h_mask;
  View<const bool, 2> reset;
  View<const int64_t, 1> seed;
  bool is_projected;

  bool resets(int64_t t, int64_t entry) const { return reset.defined() && reset(t, entry); }
  int64_t seed_of(int64_t entry) const { return seed.defined() ? seed(entry) : 0; }
};

// How often weights were asked for before, more or less: a call begins where the one before ended.
inline int next_turn(const void* weights) {
  static int turns[64];
  const uintptr_t page = reinterpret_cast<uintptr_t>(weights) >> 12;
  return __atomic_fetch_add(&turns[page % 64], 1, __ATOMIC_RELAXED) & 1;
}

template <typename E, typename O>
struct Forward {
  using V = Vec<E>;
  static constexpr int N = opwright::kLanes<E>;

  const Schedule& schedule;
  const Parameters<E, O>& layer;
  // Compact rows of 4H, weight_ih @ x, normalised if layers are; null where that is computed on the
  // way, from the compact rows of the input itself.
  const E* from_input;
  const O* x;
  int64_t x_stride;
  Panels<O> ih;
  GateRows<O> ih_rows;
  // Weights packed for the call: panel p, also of `ih`, has registers p of all gates. In their
  // place, where packing does not pay, weight_hh itself; or what is kept between calls, of the
  // inputs too.
  Panels<O> hh, hr;
  GateRows<O> hh_rows;
  Prepared ih_prepared, hh_prepared, hr_prepared;
  Sequence<E> output, cells, gates;
  int turn = 0;  // odd: the first step goes through the panels from the last

  Buffer<E> c, h;        // [B, Hp]; [B, Rp], kept for zoneout
  Buffer<O> operand[2];  // [B, Rp]: h as products take it, of this step and of the next
  Buffer<O> projected;   // [B, Hp]: o * tanh(c)
  Buffer<E> from_h, o,
      cell;  // [B, 4, Hp], [B, Hp], [B, Hp]: between the phases of a normalised step
  Moments<E> moments_h, moments_c;

  void allocate() {
    turn = next_turn(hh_prepared.data ? hh_prepared.data : hh_rows.data);
    const int64_t B = schedule.entries;
    c.allocate_zeros(B * layer.Hp);
    for (auto& buffer : operand) buffer.allocate_zeros(B * layer.Rp);
    if (layer.options.zoneout_h) h.allocate_zeros(B * layer.Rp);
    if (layer.is_projected) projected.allocate_zeros(B * layer.Hp);
    if (!layer.norm_c.data()) return;
    from_h.allocate_zeros(B * 4 * layer.Hp);
    o.allocate(B * layer.Hp);
    cell.allocate(B * layer.Hp);
    moments_h.allocate(B, layer.H);
    moments_c.allocate(B, layer.H);
  }

  static int64_t lanes_at(int64_t column, int64_t width) {
    return width - column < N ? width - column : N;
  }

  // What zoneout keeps, of c and, where h has the same units, of h.
  OPWRIGHT_INLINE Kept<E> kept_at(int64_t t, int64_t place, int64_t column) const {
    if (!layer.options.zoneout_h && !layer.options.zoneout_c) return {V{}, V{}};
    return kept(layer.options, layer.seed_of(schedule.entry(place)), column, t);
  }

  // h of one row: registers from `column`, `value` from this step's gates.
  OPWRIGHT_INLINE void finish_h(int64_t step, int64_t place, int64_t column, V value, V keep) {
    const int64_t t = schedule.time(step), entry = schedule.entry(place);
    const int count = static_cast<int>(lanes_at(column, layer.R));
    const auto& options = layer.options;
    if (options.zoneout_h) {
      E* past = &h[place * layer.Rp + column];
      const V before = layer.resets(t, entry) ? V{} : opwright::load(past);
      value = mixed(keep, before, value);
      value = output.narrowed(value);
      opwright::store(past, value);
    }
    output.store(output.at(t, entry) + column, value, count);
    const int64_t next = step + 1;
    if (next == schedule.steps) return;
    if (layer.resets(schedule.time(next), entry)) value = V{};
    if (layer.h_mask.exists()) {
      value = output.narrowed(value) * layer.h_mask.load(layer.h_mask.at(0, entry) + column, count);
    }
    store_operand(&operand[next % 2][place * layer.Rp + column], value);
  }

  OPWRIGHT_INLINE void store_operand(O* to, V value) const {
    opwright::store(to, output.narrowed(value));
  }

  // c of one row; returns the cell before zoneout.
  template <bool kIsPlain>
  OPWRIGHT_INLINE void finish_c(int64_t t, int64_t place, int64_t column, V before, V value,
                                V keep) {
    if constexpr (!kIsPlain) {
      if (layer.options.zoneout_c) value = mixed(keep, before, value);
    }
    opwright::store(&c[place * layer.Hp + column], value);
    if (cells.exists()) {
      cells.store(cells.at(t, schedule.entry(place)) + column, value,
                  static_cast<int>(lanes_at(column, layer.H)));
    }
  }

  // From the sums of the gates to the cell, and to o.
  template <bool kIsPlain>
  OPWRIGHT_INLINE V new_cell(int64_t t, int64_t place, int64_t column, V (&z)[4], V* o_gate,
                             V keep) {
    const Activations<kIsPlain, E> act{layer.options};
    const int64_t entry = schedule.entry(place);
    V before = opwright::load(&c[place * layer.Hp + column]);
    if constexpr (!kIsPlain) {
      if (layer.resets(t, entry)) before = V{};
      if (layer.peephole.data()) {
        const E* p = &layer.peephole[column];
        z[0] = fma(opwright::load(p), before, z[0]);
        z[1] = fma(opwright::load(p + layer.Hp), before, z[1]);
      }
    }
    const V i = act.sigmoid(z[0]);
    V f;
    if (!kIsPlain && layer.options.is_coupled)
      f = 1 - i;
    else
      f = act.sigmoid(z[1]);
    const V value = fma(f, before, i * act.tanh(act.clipped(z[2])));
    if constexpr (!kIsPlain) {
      if (layer.peephole.data())
        z[3] = fma(opwright::load(&layer.peephole[2 * layer.Hp + column]), value, z[3]);
    }
    *o_gate = act.sigmoid(z[3]);
    finish_c<kIsPlain>(t, place, column, before, value, keep);
    if (gates.exists() && !layer.norm_c.data()) {
      const int64_t row = gates.at(t, entry) + column;
      const int count = static_cast<int>(lanes_at(column, layer.H));
      for (int j = 0; j < 4; ++j) gates.store(row + j * layer.H, z[j], count);
    }
    return value;
  }

  OPWRIGHT_INLINE void finish_out(int64_t step, int64_t place, int64_t column, V value, V keep) {
    if (layer.is_projected)
      store_operand(&projected[place * layer.Hp + column], value);
    else
      finish_h(step, place, column, value, keep);
  }

  // weight_hh @ h for some rows and one register of units; `next` is the panel that is read after
  // this one.
  void multiply_h(const O* rows, int64_t count, int64_t panel, int64_t next, Sums<E>* sums) const {
    if (!hh_rows.data && !hh_prepared.data)
      return multiply_panel<E>(rows, layer.Rp, count, hh[panel], hh.k, hh[next], sums);
    __builtin_memset(static_cast<void*>(sums), 0, count * sizeof(Sums<E>));
    if (hh_prepared.data)
      return multiply_prepared_gates<E>(rows, layer.Rp, count, hh_prepared, panel * N, sums);
    dot_rows<E>(rows, layer.Rp, count, hh_rows, panel * N, sums);
  }

  // weight_ih @ x for the panels of a member and the rows of some steps: they stay in its cache
  // until those steps take them.
  struct InputSums {
    Buffer<Sums<E>> memory;  // [panels, rows]
    int64_t first_panel = 0, first_row = 0, rows = 0, end_step = 0;

    Sums<E>* at(int64_t panel, int64_t row) const {
      return &memory[(panel - first_panel) * rows + row - first_row];
    }
  };

  // Computes those of a step, and of the steps after it that fit a block of rows with it.
  void multiply_ahead(int64_t step, const Share& share, InputSums& sums) const {
    if (!ih.data || step < sums.end_step) return;
    sums.first_row = schedule.first_row(schedule.time(step)), sums.rows = 0;
    do {
      const int64_t t = schedule.time(sums.end_step), row = schedule.first_row(t);
      if (row < sums.first_row) sums.first_row = row;
      sums.rows += schedule.active(t);
    } while (++sums.end_step < schedule.steps &&
             sums.rows + schedule.active(schedule.time(sums.end_step)) <= kRowsOfBlock<O>);
    for (int64_t panel = share.begin; panel < share.end; ++panel) {
      multiply_panel<E>(x + sums.first_row * x_stride, x_stride, sums.rows, ih[panel], ih.k,
                        ih.after(panel, share.begin, share.end), sums.at(panel, sums.first_row));
    }
  }

  // Adds weight_ih @ x, where that is not done yet.
  void multiply_x(int64_t row, int64_t count, int64_t panel, Sums<E>* sums) const {
    if (ih.data) return;
    if (ih_prepared.data && !from_input) {
      return multiply_prepared_gates<E>(x + row * x_stride, x_stride, count, ih_prepared, panel * N,
                                        sums);
    }
    if (!from_input) dot_rows<E>(x + row * x_stride, x_stride, count, ih_rows, panel * N, sums);
    const int64_t column = panel * N, lanes = lanes_at(column, layer.H);
    for (int64_t m = 0; lanes < N && m < count; ++m) {
      for (auto& sum : sums[m]) sum = first_lanes<E>(sum, lanes);
    }
  }

  // Fetches what add_from_input reads after the product: lines of as many pages as there are rows
  // and gates, which the CPU does not foresee.
  void fetch_from_input(int64_t row, int64_t count, int64_t column) const {
    if (!from_input) return;
    const E* from = from_input + row * 4 * layer.H + column;
    for (int64_t i = 0; i < 4 * count; ++i) __builtin_prefetch(from + i * layer.H);
  }

  OPWRIGHT_INLINE void add_bias(int64_t column, V (&z)[4]) const {
    for (int j = 0; j < 4; ++j) z[j] += opwright::load(&layer.bias[j * layer.Hp + column]);
  }

  OPWRIGHT_INLINE void add_from_input(int64_t row, int64_t column, V (&z)[4]) const {
    add_bias(column, z);
    if (!from_input) return;
    const int count = static_cast<int>(lanes_at(column, layer.H));
    for (int j = 0; j < 4; ++j) {
      const E* from = from_input + row * 4 * layer.H + j * layer.H + column;
      z[j] += load_first(from, count);
    }
  }

  // One step without normalisation, up to o * tanh(c).
  template <bool kIsPlain>
  void step(int64_t step, const Share& share, InputSums& inputs, Sums<E>* sums) {
    const Activations<kIsPlain, E> act{layer.options};
    const int64_t t = schedule.time(step), first_row = schedule.first_row(t),
                  active = schedule.active(t);
    const O* rows = operand[step % 2].data();
    multiply_ahead(step, share, inputs);
    share.for_panels(step + turn, [&](int64_t panel, int64_t next) {
      const int64_t column = panel * N;
      const Sums<E>* of_inputs = ih.data ? inputs.at(panel, first_row) : nullptr;
      fetch_from_input(first_row, active, column);
      multiply_h(rows, active, panel, next, sums);
      multiply_x(first_row, active, panel, sums);
      for (int64_t place = 0; place < active; ++place) {
        V o_gate;
        if (of_inputs) {
          add_bias(column, sums[place]);
          for (int j = 0; j < 4; ++j) sums[place][j] += of_inputs[place][j];
        } else {
          add_from_input(first_row + place, column, sums[place]);
        }
        Kept<E> keep{V{}, V{}};
        if constexpr (!kIsPlain) keep = kept_at(t, place, column);
        const V value = new_cell<kIsPlain>(t, place, column, sums[place], &o_gate, keep.c);
        finish_out(step, place, column, o_gate * act.tanh(value), keep.h);
      }
    });
  }

  // The same with layer normalisation: two barriers more.
  void normalised_step(int64_t step, const Share& share, const Member& member, Sums<E>* sums) {
    const Activations<false, E> act{layer.options};
    const int64_t t = schedule.time(step), first_row = schedule.first_row(t),
                  active = schedule.active(t);
    const int64_t H = layer.H, Hp = layer.Hp;
    const O* rows = operand[step % 2].data();
    share.for_panels(step + turn, [&](int64_t panel, int64_t next) {
      multiply_h(rows, active, panel, next, sums);
      for (int64_t place = 0; place < active; ++place) {
        for (int j = 0; j < 4; ++j)
          opwright::store(&from_h[(place * 4 + j) * Hp + panel * N], sums[place][j]);
      }
    });
    const int64_t from = share.begin * N, to = share.end * N < H ? share.end * N : H;
    for (int64_t place = 0; place < active; ++place) {
      take_moments(
          moments_h, place, 4, [&](int j) { return &from_h[(place * 4 + j) * Hp]; }, from, to);
      if (!gates.exists()) continue;
      const int64_t row = gates.at(t, schedule.entry(place));
      for (int j = 0; j < 4; ++j) {
        for (int64_t column = from; column < to; column += N) {
          gates.store(row + j * H + column, opwright::load(&from_h[(place * 4 + j) * Hp + column]),
                      static_cast<int>(lanes_at(column, H)));
        }
      }
    }
    member.barrier();
    for (int64_t place = 0; place < active; ++place) {
      E scale;
      const E mean = moments_h.joined(place, &scale);
      for (int64_t column = from; column < to; column += N) {
        V z[4], o_gate;
        for (int j = 0; j < 4; ++j) {
          z[j] = (opwright::load(&from_h[(place * 4 + j) * Hp + column]) - mean) * scale *
                 opwright::load(&layer.norm_hh[j * Hp + column]);
        }
        add_from_input(first_row + place, column, z);
        const V value = new_cell<false>(t, place, column, z, &o_gate, kept_at(t, place, column).c);
        opwright::store(&cell[place * Hp + column], value);
        opwright::store(&o[place * Hp + column], o_gate);
      }
      take_moments(moments_c, place, 1, [&](int) { return &cell[place * Hp]; }, from, to);
    }
    member.barrier();
    for (int64_t place = 0; place < active; ++place) {
      E scale;
      const E mean = moments_c.joined(place, &scale);
      for (int64_t column = from; column < to; column += N) {
        const V gain = opwright::load(&layer.norm_c[column]),
                bias = opwright::load(&layer.norm_c[Hp + column]);
        const V normal =
            fma((opwright::load(&cell[place * Hp + column]) - mean) * scale, gain, bias);
        finish_out(step, place, column, opwright::load(&o[place * Hp + column]) * act.tanh(normal),
                   kept_at(t, place, column).h);
      }
    }
  }

  // Moments of columns from..to of `count` vectors, part by part.
  template <typename Place>
  static void take_moments(const Moments<E>& moments, int64_t row, int count, const Place& place,
                           int64_t from, int64_t to) {
    for (int64_t first = from; first < to; first += kPartColumns<E>) {
      const int64_t last = first + kPartColumns<E> < to ? first + kPartColumns<E> : to;
      V sum{}, squares{};
      for (int j = 0; j < count; ++j) {
        for (int64_t column = first; column < last; column += N) {
          sum += first_lanes<E>(opwright::load(place(j) + column), last - column);
        }
      }
      const E all = static_cast<E>((last - first) * count), mean = sum_of_lanes(sum) / all;
      for (int j = 0; j < count; ++j) {
        for (int64_t column = first; column < last; column += N) {
          const V distance =
              first_lanes<E>(opwright::load(place(j) + column) - mean, last - column);
          squares = fma(distance, distance, squares);
        }
      }
      moments.set(row, first / kPartColumns<E>, all, mean, sum_of_lanes(squares));
    }
  }

  void project(int64_t step, const Share& share, Sums<E>* sums) {
    const int64_t t = schedule.time(step), active = schedule.active(t);
    for (int64_t panel = share.begin; panel < share.end; ++panel) {
      if (hr_prepared.data) {
        __builtin_memset(static_cast<void*>(sums), 0, active * sizeof(Sums<E>));
        multiply_prepared_columns<E>(projected.data(), layer.Hp, active, hr_prepared,
                                     panel * kVectors * N, sums);
      } else {
        const O* next = hr.after(panel, share.begin, share.end);
        multiply_panel<E>(projected.data(), layer.Hp, active, hr[panel], hr.k, next, sums);
      }
      for (int64_t place = 0; place < active; ++place) {
        for (int v = 0; v < kVectors; ++v) {
          const int64_t column = (panel * kVectors + v) * N;
          if (column < layer.R)
            finish_h(step, place, column, sums[place][v], kept_at(t, place, column).h);
        }
      }
    }
  }

  template <bool kIsPlain>
  void run(const Member& member) {
    Share share(layer.Hp / N, member);
    if (layer.norm_c.data()) {
      share = Share((layer.Hp / N + kVectors - 1) / kVectors, member);
      share.begin *= kVectors;
      share.end = share.end * kVectors < layer.Hp / N ? share.end * kVectors : layer.Hp / N;
    }
    const Share columns((layer.R + kVectors * N - 1) / (kVectors * N), member);
    Buffer<Sums<E>> memory(schedule.entries);
    Sums<E>* sums = memory.data();
    InputSums inputs;
    if (ih.data) {
      const int64_t rows = schedule.entries > kRowsOfBlock<O> ? schedule.entries : kRowsOfBlock<O>;
      inputs.memory.allocate((share.end - share.begin) * rows);
      inputs.first_panel = share.begin;
    }
    for (int64_t at = 0; at < schedule.steps; ++at) {
      if (layer.norm_c.data())
        normalised_step(at, share, member, sums);
      else
        step<kIsPlain>(at, share, inputs, sums);
      member.barrier();
      if (!layer.is_projected) continue;
      project(at, columns, sums);
      member.barrier();
    }
  }
};

}  // namespace opwright_ops
