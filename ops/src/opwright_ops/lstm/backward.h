// The steps of a sequence taken back: the gradients of gates, cells and h.
#pragma once

#include "forward.h"

namespace opwright_ops {

template <typename E, typename O>
struct Backward {
  using V = Vec<E>;
  static constexpr int N = opwright::kLanes<E>;

  const Schedule& schedule;
  const Parameters<E, O>& layer;
  Panels<O> hh, hr;  // of the columns of weight_hh and of weight_hr
  Sequence<E> grad_output, grad_cells, output, h_0;

  // The gates before their activations: as saved, or compact rows computed again, without
  // peepholes.
  Sequence<E> saved;
  E* computed = nullptr;

  Buffer<E> before_c;                   // compact rows of Hp: the cell before each step
  Buffer<E> grad_h, grad_c;             // [B, Rp], [B, Hp]
  Buffer<O> grad_gates;                 // compact rows of 4H: the gradient of weight_hh @ h
  Buffer<O> grad_projected, projected;  // compact rows of Rp, of Hp
  Buffer<E> grad_out;                   // [B, Hp]: of o * tanh(c), behind a projection
  Buffer<E> grad_bias, grad_peephole, grad_mask;  // [4, Hp], [3, Hp], [B, Rp]

  // Of normalised layers only. Compact rows.
  const E* from_h = nullptr;  // weight_hh @ h, where it is not what was saved
  Buffer<RowMoments<E>> moments_h, moments_c;
  Buffer<E> grad_normal, grad_o;        // [B, Hp]: between phases
  Buffer<E> grad_norm_hh, grad_norm_c;  // [4, Hp], [2, Hp]
  PartSums<E> sums_c, sums_h;

  void allocate() {
    const int64_t B = schedule.entries, rows = schedule.rows(), Hp = layer.Hp, Rp = layer.Rp;
    before_c.allocate(rows * Hp);
    grad_h.allocate_zeros(B * Rp);
    grad_c.allocate_zeros(B * Hp);
    grad_gates.allocate(rows * 4 * layer.H);
    grad_bias.allocate_zeros(4 * Hp);
    if (layer.peephole.data()) grad_peephole.allocate_zeros(3 * Hp);
    if (layer.h_mask.exists()) grad_mask.allocate_zeros(B * Rp);
    if (layer.is_projected) {
      grad_projected.allocate_zeros(rows * Rp);
      projected.allocate_zeros(rows * Hp);
      grad_out.allocate(B * Hp);
    }
    if (!layer.norm_c.data()) return;
    moments_c.allocate(rows);
    grad_normal.allocate(B * Hp);
    grad_o.allocate(B * Hp);
    grad_norm_hh.allocate_zeros(4 * Hp);
    grad_norm_c.allocate_zeros(2 * Hp);
    sums_c.allocate(B, layer.H);
    sums_h.allocate(B, layer.H);
  }

  static int lanes_at(int64_t column, int64_t width) {
    return static_cast<int>(width - column < N ? width - column : N);
  }

  // The step at which an entry starts, and h before a step, as it was computed.
  bool is_first(int64_t t, int64_t place) const {
    return t == (schedule.reverse ? schedule.length(place) - 1 : 0);
  }
  OPWRIGHT_INLINE V h_before(int64_t t, int64_t place, int64_t column) const {
    const int64_t entry = schedule.entry(place);
    const int count = lanes_at(column, layer.R);
    if (layer.resets(t, entry)) return V{};
    if (is_first(t, place)) return h_0.exists() ? h_0.load(h_0.at(0, entry) + column, count) : V{};
    return output.load(output.at(schedule.reverse ? t + 1 : t - 1, entry) + column, count);
  }
  // h as weight_hh takes it.
  OPWRIGHT_INLINE V operand_before(int64_t t, int64_t place, int64_t column) const {
    const V value = h_before(t, place, column);
    if (!layer.h_mask.exists()) return value;
    const int64_t entry = schedule.entry(place);
    return output.narrowed(
        value * layer.h_mask.load(layer.h_mask.at(0, entry) + column, lanes_at(column, layer.R)));
  }

  OPWRIGHT_INLINE void load_gates(int64_t t, int64_t place, int64_t column, V (&z)[4]) const {
    const int count = lanes_at(column, layer.H);
    if (computed) {
      const E* row = computed + (schedule.first_row(t) + place) * 4 * layer.H + column;
      for (int j = 0; j < 4; ++j) {
        z[j] = load_first(row + j * layer.H, count);
      }
    } else {
      const int64_t row = saved.at(t, schedule.entry(place)) + column;
      for (int j = 0; j < 4; ++j) z[j] = saved.load(row + j * layer.H, count);
    }
  }

  // Computes the cells again, for registers share.begin to share.end; adds peepholes to gates that
  // lack them.
  template <bool kIsPlain>
  void scan(int64_t begin, int64_t end, Buffer<E>& c) {
    const Activations<kIsPlain, E> act{layer.options};
    for (int64_t step = 0; step < schedule.steps; ++step) {
      const int64_t t = schedule.time(step), first_row = schedule.first_row(t);
      for (int64_t place = 0; place < schedule.active(t); ++place) {
        const int64_t entry = schedule.entry(place);
        for (int64_t at = begin; at < end; ++at) {
          const int64_t column = at * N;
          V z[4], before = opwright::load(&c[place * layer.Hp + column]);
          load_gates(t, place, column, z);
          const bool lacks_peepholes = !kIsPlain && computed && layer.peephole.data();
          if constexpr (!kIsPlain) {
            if (layer.resets(t, entry)) before = V{};
            if (lacks_peepholes) {
              z[0] = fma(opwright::load(&layer.peephole[column]), before, z[0]);
              z[1] = fma(opwright::load(&layer.peephole[layer.Hp + column]), before, z[1]);
            }
          }
          opwright::store(&before_c[(first_row + place) * layer.Hp + column], before);
          const V i = act.sigmoid(z[0]);
          V f;
          if (!kIsPlain && layer.options.is_coupled)
            f = 1 - i;
          else
            f = act.sigmoid(z[1]);
          V value = fma(f, before, i * act.tanh(act.clipped(z[2])));
          if constexpr (!kIsPlain) {
            if (lacks_peepholes) {
              z[3] = fma(opwright::load(&layer.peephole[2 * layer.Hp + column]), value, z[3]);
              E* row = computed + (first_row + place) * 4 * layer.H + column;
              for (int j = 0; j < 4; ++j)
                store_first(row + j * layer.H, z[j], lanes_at(column, layer.H));
            }
            if (layer.options.zoneout_c) {
              value = mixed(kept(layer.options, layer.seed_of(entry), column, t).c, before, value);
            }
          }
          opwright::store(&c[place * layer.Hp + column], value);
        }
      }
    }
  }

  // What the forward computed in one register of units.
  struct Unit {
    V z[4], i, f, g, o, before, cell, normal, squashed;
  };

  template <bool kIsPlain>
  OPWRIGHT_INLINE void load_unit(int64_t t, int64_t place, int64_t column, Unit& u) const {
    const Activations<kIsPlain, E> act{layer.options};
    load_gates(t, place, column, u.z);
    const int64_t row = schedule.first_row(t) + place;
    u.before = opwright::load(&before_c[row * layer.Hp + column]);
    u.i = act.sigmoid(u.z[0]);
    if (!kIsPlain && layer.options.is_coupled)
      u.f = 1 - u.i;
    else
      u.f = act.sigmoid(u.z[1]);
    u.g = act.tanh(act.clipped(u.z[2]));
    u.o = act.sigmoid(u.z[3]);
    u.cell = fma(u.f, u.before, u.i * u.g);
    u.normal = u.cell;
    if constexpr (!kIsPlain) {
      if (layer.norm_c.data()) {
        u.normal = fma(unit_cell(row, u.cell), opwright::load(&layer.norm_c[column]),
                       opwright::load(&layer.norm_c[layer.Hp + column]));
      }
    }
    u.squashed = act.tanh(u.normal);
  }
  OPWRIGHT_INLINE V unit_cell(int64_t row, V cell) const {
    return (cell - moments_c[row].mean) * moments_c[row].scale;
  }

  // The gradient of h after a step, without the part that zoneout hands on, which stays in grad_h.
  OPWRIGHT_INLINE V take_grad_h(int64_t t, int64_t place, int64_t column, V keep) {
    const int64_t entry = schedule.entry(place);
    E* carried = &grad_h[place * layer.Rp + column];
    const int count = lanes_at(column, layer.R);
    V total = opwright::load(carried) + grad_output.load(grad_output.at(t, entry) + column, count);
    if (!layer.options.zoneout_h) return total;
    const V past = total * keep;
    opwright::store(carried, past);
    return total - past;
  }

  OPWRIGHT_INLINE V grad_out_at(int64_t t, int64_t place, int64_t column, V keep) {
    if (layer.is_projected) return opwright::load(&grad_out[place * layer.Hp + column]);
    return take_grad_h(t, place, column, keep);
  }

  OPWRIGHT_INLINE Kept<E> kept_at(int64_t t, int64_t place, int64_t column) const {
    if (!layer.options.zoneout_h && !layer.options.zoneout_c) return {V{}, V{}};
    return kept(layer.options, layer.seed_of(schedule.entry(place)), column, t);
  }

  // From the gradient of the cell by way of its tanh to those of the gates and of the cell before.
  template <bool kIsPlain>
  OPWRIGHT_INLINE void grad_of_gates(int64_t t, int64_t place, int64_t column, const Unit& u,
                                     V from_tanh, V (&grad)[4], V (&peepholes)[3], V keep) {
    const Activations<kIsPlain, E> act{layer.options};
    const int64_t entry = schedule.entry(place);
    E* carried = &grad_c[place * layer.Hp + column];
    V total = opwright::load(carried), past{};
    if constexpr (!kIsPlain) {
      if (grad_cells.exists()) {
        total += grad_cells.load(grad_cells.at(t, entry) + column, lanes_at(column, layer.H));
      }
      if (layer.options.zoneout_c) {
        past = total * keep;
        total -= past;
      }
    }
    total += from_tanh;
    const E* peephole = layer.peephole.data() + column;
    const bool has_peepholes = !kIsPlain && layer.peephole.data();
    if (has_peepholes) total = fma(opwright::load(peephole + 2 * layer.Hp), grad[3], total);
    const bool is_coupled = !kIsPlain && layer.options.is_coupled;
    const V to_f = total * u.before, to_i = total * u.g;
    grad[0] = act.times_d_sigmoid(is_coupled ? to_i - to_f : to_i, u.z[0], u.i);
    grad[1] = is_coupled ? V{} : act.times_d_sigmoid(to_f, u.z[1], u.f);
    grad[2] = act.times_d_gate_tanh(total * u.i, u.z[2], u.g);
    past = fma(total, u.f, past);
    if (has_peepholes) {
      past = fma(opwright::load(peephole), grad[0], past);
      past = fma(opwright::load(peephole + layer.Hp), grad[1], past);
      peepholes[0] = fma(grad[0], u.before, peepholes[0]);
      peepholes[1] = fma(grad[1], u.before, peepholes[1]);
      peepholes[2] = fma(grad[3], u.cell, peepholes[2]);
    }
    opwright::store(carried, layer.resets(t, entry) ? V{} : past);
  }

  static OPWRIGHT_INLINE void add_to(E* place, V value) {
    opwright::store(place, opwright::load(place) + value);
  }

  // The registers of columns first*kVectors to last*kVectors that exist.
  int64_t last_register(const Share& share, int64_t width) const {
    const int64_t all = (width + N - 1) / N, last = share.end * kVectors;
    return last < all ? last : all;
  }

  template <bool kIsPlain>
  void keep_projected(int64_t row, int64_t column, const Unit& u) {
    if (layer.is_projected) {
      opwright::store(&projected[row * layer.Hp + column], output.narrowed(u.o * u.squashed));
    }
  }

  // The elementwise part of one step without normalisation.
  template <bool kIsPlain>
  void step(int64_t t, const Share& share) {
    const Activations<kIsPlain, E> act{layer.options};
    const int64_t first_row = schedule.first_row(t), active = schedule.active(t), H = layer.H;
    // Along the rows: their lines of several arrays, each in a page of its own, are read in order.
    for (int64_t place = 0; place < active; ++place) {
      O* row = &grad_gates[(first_row + place) * 4 * H];
      for (int64_t at = share.begin * kVectors; at < last_register(share, H); ++at) {
        const int64_t column = at * N;
        const int count = lanes_at(column, H);
        Unit u;
        V grad[4], peepholes[3] = {};
        load_unit<kIsPlain>(t, place, column, u);
        Kept<E> keep{V{}, V{}};
        if constexpr (!kIsPlain) keep = kept_at(t, place, column);
        const V out = grad_out_at(t, place, column, keep.h);
        grad[3] = act.times_d_sigmoid(out * u.squashed, u.z[3], u.o);
        const V from_tanh = act.times_d_tanh(out * u.o, u.normal, u.squashed);
        grad_of_gates<kIsPlain>(t, place, column, u, from_tanh, grad, peepholes, keep.c);
        for (int j = 0; j < 4; ++j) store_first(row + j * H + column, grad[j], count);
        keep_projected<kIsPlain>(first_row + place, column, u);
        add_sums(column, grad, peepholes);
      }
    }
  }

  OPWRIGHT_INLINE void add_sums(int64_t column, const V (&bias)[4], const V (&peepholes)[3]) {
    for (int j = 0; j < 4; ++j) add_to(&grad_bias[j * layer.Hp + column], bias[j]);
    if (!layer.peephole.data()) return;
    for (int j = 0; j < 3; ++j) add_to(&grad_peephole[j * layer.Hp + column], peepholes[j]);
  }

  // The same with layer normalisation: two barriers more. The gradient of the sum of both
  // normalised products takes the place of the gates in `computed`.
  void normalised_step(int64_t t, const Share& share, const Member& member) {
    const Activations<false, E> act{layer.options};
    const int64_t first_row = schedule.first_row(t), active = schedule.active(t), H = layer.H,
                  Hp = layer.Hp;
    const int64_t begin = share.begin * kVectors, end = last_register(share, H);
    for (int64_t place = 0; place < active; ++place) {
      const int64_t row = first_row + place;
      V first{}, second{};
      for (int64_t at = begin; at < end; ++at) {
        const int64_t column = at * N;
        Unit u;
        load_unit<false>(t, place, column, u);
        const V out = grad_out_at(t, place, column, kept_at(t, place, column).h);
        opwright::store(&grad_o[place * Hp + column],
                        act.times_d_sigmoid(out * u.squashed, u.z[3], u.o));
        const V unit = unit_cell(row, u.cell);
        const V grad =
            first_lanes<E>(act.times_d_tanh(out * u.o, u.normal, u.squashed), H - column);
        add_to(&grad_norm_c[column], grad * unit);
        add_to(&grad_norm_c[Hp + column], grad);
        const V scaled = grad * opwright::load(&layer.norm_c[column]);
        opwright::store(&grad_normal[place * Hp + column], scaled);
        first += scaled;
        second = fma(scaled, unit, second);
        keep_projected<false>(row, column, u);
        if (at % kVectors == kVectors - 1 || at == end - 1) {
          sums_c.set(place, at / kVectors, sum_of_lanes(first), sum_of_lanes(second));
          first = second = V{};
        }
      }
    }
    member.barrier();
    for (int64_t place = 0; place < active; ++place) {
      const int64_t row = first_row + place;
      E first, second;
      sums_c.joined(place, &first, &second);
      first /= H, second /= H;
      V first_h{}, second_h{};
      for (int64_t at = begin; at < end; ++at) {
        const int64_t column = at * N;
        const int count = lanes_at(column, H);
        Unit u;
        V grad[4], bias[4], peepholes[3] = {};
        load_unit<false>(t, place, column, u);
        grad[3] = opwright::load(&grad_o[place * Hp + column]);
        const V scaled = opwright::load(&grad_normal[place * Hp + column]);
        const V from_tanh =
            (scaled - first - unit_cell(row, u.cell) * second) * moments_c[row].scale;
        grad_of_gates<false>(t, place, column, u, first_lanes<E>(from_tanh, count), grad, peepholes,
                             kept_at(t, place, column).c);
        for (int j = 0; j < 4; ++j) {
          grad[j] = bias[j] = first_lanes<E>(grad[j], count);
          store_first(computed + row * 4 * H + j * H + column, grad[j], count);
          const V unit = unit_h(t, place, j, column, count);
          add_to(&grad_norm_hh[j * Hp + column], grad[j] * unit);
          const V to_unit = grad[j] * opwright::load(&layer.norm_hh[j * Hp + column]);
          first_h += to_unit;
          second_h = fma(to_unit, unit, second_h);
        }
        add_sums(column, bias, peepholes);
        if (at % kVectors == kVectors - 1 || at == end - 1) {
          sums_h.set(place, at / kVectors, sum_of_lanes(first_h), sum_of_lanes(second_h));
          first_h = second_h = V{};
        }
      }
    }
    member.barrier();
    for (int64_t place = 0; place < active; ++place) {
      const int64_t row = first_row + place;
      E first, second;
      sums_h.joined(place, &first, &second);
      first /= 4 * H, second /= 4 * H;
      for (int64_t at = begin; at < end; ++at) {
        const int64_t column = at * N;
        const int count = lanes_at(column, H);
        for (int j = 0; j < 4; ++j) {
          const V grad = load_first(computed + row * 4 * H + j * H + column, count);
          const V to_unit = grad * opwright::load(&layer.norm_hh[j * Hp + column]);
          const V value = (to_unit - first - unit_h(t, place, j, column, count) * second) *
                          moments_h[row].scale;
          store_first(&grad_gates[row * 4 * H + j * H + column], value, count);
        }
      }
    }
  }
  // weight_hh @ h of one row, from element i of 4H.
  OPWRIGHT_INLINE V load_from_h(int64_t t, int64_t place, int64_t i, int count) const {
    if (from_h)
      return load_first(from_h + (schedule.first_row(t) + place) * 4 * layer.H + i, count);
    return saved.load(saved.at(t, schedule.entry(place)) + i, count);
  }
  OPWRIGHT_INLINE V unit_h(int64_t t, int64_t place, int j, int64_t column, int count) const {
    const int64_t row = schedule.first_row(t) + place;
    const V value = load_from_h(t, place, j * layer.H + column, count);
    return first_lanes<E>((value - moments_h[row].mean) * moments_h[row].scale, count);
  }

  // The gradient of o * tanh(c) behind a projection.
  void unproject(int64_t t, const Share& columns, const Share& share, const Member& member,
                 Sums<E>* sums) {
    const int64_t first_row = schedule.first_row(t), active = schedule.active(t);
    for (int64_t at = columns.begin * kVectors; at < last_register(columns, layer.R); ++at) {
      for (int64_t place = 0; place < active; ++place) {
        const V grad = take_grad_h(t, place, at * N, kept_at(t, place, at * N).h);
        opwright::store(&grad_projected[(first_row + place) * layer.Rp + at * N],
                        first_lanes<E>(output.narrowed(grad), layer.R - at * N));
      }
    }
    member.barrier();
    for (int64_t panel = share.begin; panel < share.end; ++panel) {
      const O* next = hr.after(panel, share.begin, share.end);
      multiply_panel<E>(&grad_projected[first_row * layer.Rp], layer.Rp, active, hr[panel], hr.k,
                        next, sums);
      for (int64_t place = 0; place < active; ++place) {
        for (int v = 0; v < kVectors; ++v) {
          const int64_t column = (panel * kVectors + v) * N;
          if (column < layer.Hp)
            opwright::store(&grad_out[place * layer.Hp + column], sums[place][v]);
        }
      }
    }
  }

  // The gradient of h before a step.
  void carry_h(int64_t t, const Share& columns, Sums<E>* sums) {
    const int64_t first_row = schedule.first_row(t), active = schedule.active(t),
                  width = 4 * layer.H;
    columns.for_panels(t, [&](int64_t panel, int64_t next) {
      multiply_panel<E>(&grad_gates[first_row * width], width, active, hh[panel], hh.k, hh[next],
                        sums);
      for (int64_t place = 0; place < active; ++place) {
        const int64_t entry = schedule.entry(place);
        const bool resets = layer.resets(t, entry);
        for (int v = 0; v < kVectors; ++v) {
          const int64_t column = (panel * kVectors + v) * N;
          if (column >= layer.R) break;
          V value = sums[place][v];
          if (layer.h_mask.exists()) {
            add_to(&grad_mask[place * layer.Rp + column], value * h_before(t, place, column));
            value *=
                layer.h_mask.load(layer.h_mask.at(0, entry) + column, lanes_at(column, layer.R));
          }
          E* carried = &grad_h[place * layer.Rp + column];
          if (layer.options.zoneout_h) value += opwright::load(carried);
          opwright::store(carried, resets ? V{} : value);
        }
      }
    });
  }

  template <bool kIsPlain>
  void run(const Member& member) {
    const Share columns(hh.count, member);
    const Share share(round_up(layer.H, kPanelColumns<O>) / kPanelColumns<O>, member);
    Buffer<Sums<E>> memory(schedule.entries);
    Sums<E>* sums = memory.data();
    for (int64_t at = schedule.steps - 1; at >= 0; --at) {
      const int64_t t = schedule.time(at);
      if (layer.is_projected) unproject(t, columns, share, member, sums);
      if (layer.norm_c.data())
        normalised_step(t, share, member);
      else
        step<kIsPlain>(t, share);
      member.barrier();
      carry_h(t, columns, sums);
    }
  }
};

}  // namespace opwright_ops
