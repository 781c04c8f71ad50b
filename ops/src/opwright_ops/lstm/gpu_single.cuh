// All steps of a narrow LSTM in one launch, each entry of the batch in a block of its own: all
// weights are in the registers of a block, and nothing goes from one to another.
#pragma once

#include "gpu_grid.cuh"
#include "gpu_grid_back.cuh"

namespace opwright_ops::gpu {

// A barrier of some threads of a block. All wait, those too that only say that they are done
// (barrier.arrive): the others are there before them, so it costs nothing, and racecheck knows no
// other. Not aligned: the threads of a warp may come one after another, since those of units past H
// skip part of a step.
__device__ inline void meet(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// As wide as WIDTH units. Four threads for each unit multiply; others, one for each cell, do the
// rest of a step, and read and write memory while those multiply. Reading what all have written
// takes most of a product: so a thread multiplies each element that it reads with four weights, and
// the sums of threads meet. Fast: without options.
template <typename T, bool kIsFast, int WIDTH>
struct Single {
  using E = compute_t<T>;
  static constexpr int kRows = 4 * WIDTH;  // threads that multiply
  static constexpr int kAhead = 8;         // steps that are read before they are taken
  static constexpr int kTurns = 4;  // threads for each cell of the backward, which take turns
  static constexpr int kForward = kRows + WIDTH, kBackward = kRows + kTurns * WIDTH;
  // Barriers; of the second there is one for each turn.
  static constexpr int kIsDone = 1, kIsMultiplied = 2;

  static bool is_for(const Layer<T>& layer) {
    return layer.H <= WIDTH && (!kIsFast || layer.is_plain());
  }

  // Four weights for each of the elements of `with` that this thread reads: 4 LANES i + 4 lane + e,
  // for e < 4. The sums of four lanes that follow each other are added up, and each of the lanes
  // keeps one.
  template <int LANES>
  __device__ static E product(const E (&own)[WIDTH / 4][4], const E* with, int lane) {
    E sums[4] = {};
#pragma unroll
    for (int i = 0; i < WIDTH / 16; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(with + 4 * LANES * i + 4 * lane);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[j] += own[4 * i][j] * v.x, sums[j] += own[4 * i + 1][j] * v.y;
        sums[j] += own[4 * i + 2][j] * v.z, sums[j] += own[4 * i + 3][j] * v.w;
      }
    }
    return kept_of(kept_of(sums[0], sums[2], 2), kept_of(sums[1], sums[3], 2), 1);
  }

  __device__ static void take(const GridSteps<T>& a) {
    constexpr int kPart = 16;  // columns that are brought at once
    __shared__ alignas(16) E h_of[WIDTH];
    __shared__ E from_h[4][WIDTH], x_of[kAhead][4][WIDTH], part[kRows][kPart + 1];
    const Layer<T> layer = kIsFast ? plain(a.layer) : a.layer;
    const int H = static_cast<int>(layer.H), B = static_cast<int>(layer.B);
    const int thread = threadIdx.x, entry = blockIdx.x;
    const bool multiplies = thread < kRows;
    const int unit = multiplies ? thread / 4 : thread - kRows, lane = thread % 4;
    E weights[WIDTH / 4][4];  // for each gate
#pragma unroll
    for (int from = 0; from < WIDTH; from += kPart) {
      __syncthreads();
#pragma unroll 4
      for (int i = thread; i < kRows * kPart; i += kForward) {
        const int of = i / kPart, column = from + i % kPart;
        part[of][i % kPart] = of / 4 < H && column < H
                                  ? static_cast<E>(a.weight_hh(of % 4 * H + of / 4, column))
                                  : E(0);
      }
      __syncthreads();
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int j = 0; j < 4; ++j) weights[from / 4 + e][j] = part[unit * 4 + j][4 * lane + e];
    }
    if (thread < WIDTH)
      h_of[thread] = thread < H ? static_cast<E>(a.state.operand[entry * H + thread]) : E(0);
    __syncthreads();
    if (multiplies) {
      for (int step = 0; step < a.count; ++step) {
        if (step > 0) meet(kIsDone, kForward);
        from_h[lane][unit] = product<4>(weights, h_of, lane);
        meet(kIsMultiplied, kForward);
      }
      return;
    }

    // A thread for each cell.
    const bool is_real = unit < H;
    const int direction = a.reverse ? -1 : 1;
    const int64_t inputs = int64_t{B} * 4 * H * direction;  // from a step to the next
    const E* from_input = a.from_input + (a.reverse ? int64_t{a.count - 1} * B * 4 * H : 0) +
                          int64_t{entry} * 4 * H + unit;
    const auto fetch = [&](int step) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        E* const to = &x_of[step % kAhead][j][unit];
        if (is_real && step < a.count) opwright::copy_async<sizeof(E)>(to, from_input + j * H);
      }
      opwright::end_copies();
      from_input += inputs;
    };
    for (int step = 0; step < kAhead; ++step) fetch(step);
    E c = is_real ? a.state.c[entry * H + unit] : E(0), bias[4] = {};
    T h = is_real ? a.state.h[entry * H + unit] : T(0.0f);
    for (int j = 0; j < 4 && is_real; ++j) bias[j] = layer.bias[j * H + unit];
    // Where the next step leaves its results.
    const auto trail = [&](const View<T, 3>& of) {
      return of.defined() && is_real ? &of(a.first, entry, unit) : nullptr;
    };
    T *output = trail(a.state.output), *cells = trail(a.state.cells), *gates = trail(a.state.gates);
    const int64_t next_output = direction * a.state.output.stride(0),
                  next_cells = direction * a.state.cells.stride(0),
                  next_gates = direction * a.state.gates.stride(0),
                  next_gate = H * a.state.gates.stride(2);
    for (int step = 0; step < a.count; ++step) {
      const int64_t t = a.first + step * direction;
      const bool is_last = step + 1 == a.count, is_active = is_real && layer.is_active(t, entry);
      opwright::wait_for_copies<kAhead - 1>();
      E z[4], c_after = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) z[j] = x_of[step % kAhead][j][unit] + bias[j];
      meet(kIsMultiplied, kForward);
      if (is_real) {
#pragma unroll
        for (int j = 0; j < 4; ++j) z[j] += from_h[j][unit];
        const E before = layer.resets(t, entry) ? E(0) : c;
        const E cell = new_cell(layer, unit, z, before);
        const auto keeps = kept(layer.options, layer.seed, entry, unit, t);
        c_after = mix(keeps.c, before, cell);
        const E out = static_cast<E>(new_out(layer, z[3], cell));
        if (is_active) take_h(layer, t, entry, out, keeps.h, h), c = c_after;
        const T operand = operand_of(layer, is_last ? a.after : t + direction, entry, unit, h);
        h_of[unit] = static_cast<E>(operand);
        if (is_last) a.state.operand[entry * H + unit] = operand;
      }
      if (!is_last) meet(kIsDone, kForward);
      // While the others multiply.
      fetch(step + kAhead);
      if (output) *output = is_active ? h : T(0.0f), output += next_output;
      if (cells) *cells = is_active ? static_cast<T>(c_after) : T(0.0f), cells += next_cells;
      if (!gates) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) gates[j * next_gate] = is_active ? static_cast<T>(z[j]) : T(0.0f);
      gates += next_gates;
    }
    if (is_real) a.state.c[entry * H + unit] = c, a.state.h[entry * H + unit] = h;
  }

  __device__ static void sweep(const GridSweep<T>& a) {
    constexpr int kPart = 64;  // rows of weight_hh that are brought at once
    __shared__ alignas(16) E grads[kRows];
    __shared__ E part[kPart][WIDTH + 1], to_h_of[WIDTH], grad_h_of[WIDTH], grad_c_of[WIDTH];
    const Layer<T> layer = kIsFast ? plain(a.layer) : a.layer;
    const int H = static_cast<int>(layer.H), B = static_cast<int>(layer.B);
    const int thread = threadIdx.x, entry = blockIdx.x, steps = static_cast<int>(a.past.steps);
    // A half of a warp multiplies for four units; a thread has the weights of these four.
    const int lane = thread % 16, fours = thread / 16 * 4;
    E weights[WIDTH / 4][4];
#pragma unroll
    for (int from = 0; from < kRows; from += kPart) {
      __syncthreads();
#pragma unroll 4
      for (int i = thread; i < kPart * WIDTH; i += kBackward) {
        const int of = from + i / WIDTH, gate = of / WIDTH, k = of % WIDTH, unit = i % WIDTH;
        part[i / WIDTH][unit] =
            k < H && unit < H ? static_cast<E>(a.weight_hh(gate * H + k, unit)) : E(0);
      }
      __syncthreads();
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          weights[from / kPart * 4 + e][j] = thread < kRows ? part[4 * lane + e][fours + j] : E(0);
    }
    for (int i = thread; i < kRows; i += kBackward) grads[i] = 0;
    for (int i = thread; i < H; i += kBackward)
      grad_h_of[i] = a.sweep.grad_h[entry * H + i], grad_c_of[i] = a.sweep.grad_c[entry * H + i];
    __syncthreads();
    constexpr int kMeet = kRows + WIDTH;
    if (thread < kRows) {
      for (int step = 0; step <= steps; ++step) {
        if (step > 0) meet(kIsDone, kMeet);
        E to_h = product<16>(weights, grads, lane);
        to_h += __shfl_xor_sync(~0u, to_h, 4);
        to_h += __shfl_xor_sync(~0u, to_h, 8);
        const int unit = fours + lane;
        if (lane < 4 && step < steps) to_h_of[unit] = to_h;
        if (lane < 4 && step == steps && unit < H) a.sweep.to_h[entry * H + unit] = to_h;
        if (step < steps) meet(kIsMultiplied + step % kTurns, kMeet);
      }
      return;
    }

    // Threads for each cell, which read and prepare what a step needs while the others have their
    // turn.
    const int unit = (thread - kRows) % WIDTH, turn = (thread - kRows) / WIDTH;
    const bool is_real = unit < H, is_saved = a.past.saved.defined();
    const auto time_of = [&](int step) -> int64_t {
      return a.past.reverse ? step : steps - 1 - step;
    };
    Read<T> saved[4] = {}, grad_output = {};
    E made[4] = {}, before = 0;
    const auto fetch = [&](int step) {
      if (!is_real || step >= steps) return;
      const int64_t t = time_of(step), row = t * B + entry;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (is_saved)
          saved[j] = read(a.past.saved(t, entry, j * H + unit));
        else
          made[j] = a.past.z[row * 4 * H + j * H + unit];
      }
      before = a.past.c_before[row * H + unit];
      grad_output = read(a.sweep.grad_output(t, entry, unit));
    };
    fetch(turn);
    for (int step = turn; step < steps; step += kTurns) {
      const int64_t t = time_of(step), after = step ? time_of(step - 1) : -1;
      Gates<T> x;
#pragma unroll
      for (int j = 0; j < 4; ++j) x.z[j] = is_saved ? saved[j].value() : made[j];
      x.before = before;
      x.complete(layer.options);
      const E of_output = grad_output.value();
      const auto keeps = kept(layer.options, layer.seed, is_real ? entry : 0, unit, t);
      const bool is_active = is_real && layer.is_active(t, entry);
      T narrow[4] = {};
      meet(kIsMultiplied + turn, kMeet);
      if (is_real) {
        E grad[4] = {}, grad_c = grad_c_of[unit];
        E grad_h =
            absorb(layer, a.past, a.sweep, after, entry, unit, grad_h_of[unit], to_h_of[unit]);
        const E to_new = take_grad_h(layer, is_active, of_output, keeps.h, grad_h);
        if (is_active)
          grad_c = gates_back(layer, a.sweep, x, t, entry, unit,
                              layer.options.through_sigmoid(to_new * x.squashed, x.z[3], x.o),
                              layer.options.through_tanh(to_new * x.o, x.cell, x.squashed), keeps.c,
                              grad_c, grad);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          narrow[j] = static_cast<T>(grad[j]), grads[j * WIDTH + unit] = static_cast<E>(narrow[j]);
        grad_h_of[unit] = grad_h, grad_c_of[unit] = grad_c;
        if (step + 1 == steps)
          a.sweep.grad_h[entry * H + unit] = grad_h, a.sweep.grad_c[entry * H + unit] = grad_c;
      }
      meet(kIsDone, kMeet);
      // While the others have their turns.
      fetch(step + kTurns);
      T* const to = a.sweep.gates + (t * B + entry) * 4 * H + unit;
#pragma unroll
      for (int j = 0; j < 4 && is_real; ++j) to[j * H] = narrow[j];
    }
  }
};

template <typename T, bool kIsFast, int WIDTH>
__global__ void __launch_bounds__(Single<T, kIsFast, WIDTH>::kForward, 2)
    take_alone(GridSteps<T> steps) {
  Single<T, kIsFast, WIDTH>::take(steps);
}
template <typename T, bool kIsFast, int WIDTH>
__global__ void __launch_bounds__(Single<T, kIsFast, WIDTH>::kBackward, 1)
    sweep_alone(GridSweep<T> sweep) {
  Single<T, kIsFast, WIDTH>::sweep(sweep);
}

}  // namespace opwright_ops::gpu
