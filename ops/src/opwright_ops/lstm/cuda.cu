// An LSTM over a sequence on a GPU, of any size, type and variant: all steps in one launch where
// gpu_tiers.cuh has one, else at each step a product of ATen and a kernel for the cells, from a
// loop in C++.
#include "gpu_backward.cuh"
#include "gpu_forward.cuh"
#include "gpu_joined.cuh"
#include "gpu_tiers.cuh"

using namespace opwright_ops::gpu;
using opwright::borrow;
using opwright::call;

template <typename T>
bool rounds(Fp32Precision precision) {
  return sizeof(T) == 4 && precision == Fp32Precision::tf32;
}

// out = a b^T, for all steps.
template <typename T>
void multiply_all(compute_t<T>* out, const opwright::Tensor& a, const opwright::Tensor& b,
                  Fp32Precision precision) {
  if constexpr (opwright::detail::kSame<T, float>) {
    if (rounds<T>(precision) && a.numel() && b.numel()) return multiply_tf32(out, a, b);
  }
  multiply<T>(out, a, b.t());
}

// From as many units on, the product of a step is taken as TF32 by a convolution, though its call
// takes the host 30 us: that of float32 takes the GPU as long.
constexpr int64_t kWide = 1024;

// Of the kernels for steps without options: units of a thread, and the most elements of a step, so
// that an index has 32 bits.
constexpr int kUnitsOfThread = 2;
constexpr int64_t kMostPlain = int64_t{1} << 30;

template <typename T>
View<const T, 2> turned(const View<const T, 2>& of) {
  return {of.data(), {of.size(1), of.size(0)}, {of.stride(1), of.stride(0)}};
}
template <typename T>
opwright::Tensor contiguous(const View<const T, 2>& of) {
  if (of.is_contiguous()) return borrow(of);
  auto copy = opwright::Tensor::empty<T>({of.size(0), of.size(1)});
  opwright::call("aten::copy_", copy, borrow(of), false);
  return copy;
}

// A launch for all steps, if there is one for them and it is wanted; for those that are normalised,
// in clusters.
template <typename T>
Plan plan_for(int64_t steps, int64_t H, int64_t B, Tier tier, Fp32Precision precision,
              bool is_normalised) {
  constexpr int64_t kFewSteps = 2;  // take less time than to put the weights on the chip
  if (steps == 0 || (steps <= kFewSteps && tier == Tier::auto_)) return {};
  if (tier == Tier::step || (is_normalised && tier == Tier::grid)) return {};
  const bool is_exact = sizeof(T) == 4 && !rounds<T>(precision);
  const auto device = opwright::current_device();
  // Bytes of h of an entry: wider layers are faster through the second-level cache. So is a layer
  // of exactly this width if a cluster would have more slices than its two teams take at once.
  // (There are none for TF32.)
  constexpr int64_t kBestNear = 512, kBestSlices = 2;
  const int64_t bytes = H * int64_t{sizeof(T)};
  if (is_normalised && is_exact) return {};
  const Plan far = is_normalised ? Plan{} : far_plan<T>(H, B, device, is_exact);
  const Plan single = is_normalised ? Plan{} : single_plan<T>(H, B, device);
  const Plan near = single.blocks ? single : near_plan<T>(H, B, device, is_exact);
  if (tier == Tier::cluster || is_normalised) return near;
  const bool is_crowded =
      (kIsNarrow<T> || is_exact) && bytes == kBestNear && near.slices > kBestSlices && far.blocks;
  return tier == Tier::auto_ && near.blocks && bytes <= kBestNear && !is_crowded ? near : far;
}

// Memory that the blocks of a launch exchange chunks in; `bits` is what it has to be filled with.
inline Fill chunks_for(Scratch& scratch, const Plan& plan, int64_t groups, int buffers,
                       uint32_t bits) {
  const int64_t count =
      plan.blocks && !plan.is_near && !plan.is_single
          ? buffers * int64_t{plan.parts} * plan.slices * plan.tiles * 8 * groups * 4
          : 0;
  return {reinterpret_cast<uint4*>(scratch.take<uint8_t>(count * int64_t{sizeof(Chunk)})), count,
          bits};
}

// Take the steps in one launch; false where that cannot be.
template <typename T>
bool steps_at_once(const Plan& plan, const GridSteps<T>& steps, cudaStream_t stream) {
  if constexpr (sizeof(T) > 4) {
    return false;
  } else {
    if (plan.is_single) return take_single(steps, stream), true;
    return run_in_teams([&](int teams) { return forward_of<T>(plan, steps.layer, teams); }, steps,
                        plan, plan.is_near ? plan.blocks : 1, stream);
  }
}
template <typename T>
bool sweep_at_once(const Plan& plan, const GridSweep<T>& sweep, cudaStream_t stream) {
  if constexpr (sizeof(T) > 4) {
    return false;
  } else {
    if (plan.is_single) return sweep_single(sweep, stream), true;
    return run_in_teams([&](int teams) { return backward_of<T>(plan, sweep.layer, teams); }, sweep,
                        plan, plan.is_near ? plan.blocks : 2, stream);
  }
}

// Of the product for the inputs, which is taken for several steps at once: 512 MiB of float.
constexpr int64_t kMostProductElements = int64_t{1} << 27;

template <typename T>
void lstm(View<const T, 3> input, View<const T, 2> h_0, View<const T, 2> c_0,
          View<const T, 2> weight_ih, View<const T, 2> weight_hh, View<const T, 1> bias_ih,
          View<const T, 1> bias_hh, View<const T, 2> weight_hr, View<const T, 2> peephole,
          View<const T, 1> norm_ih, View<const T, 1> norm_hh, View<const T, 2> norm_c,
          View<const T, 2> h_mask, View<const int64_t, 1> lengths, View<const bool, 2> reset,
          View<const int64_t, 1> seed, bool reverse, Activation activation, double slope,
          bool coupled, double clip, double zoneout_h, double zoneout_c, int64_t keep_cells,
          int64_t keep_gates, Tier tier, Fp32Precision precision, View<T, 3> output, View<T, 2> h_n,
          View<T, 2> c_n, View<T, 3> cells, View<T, 3> gates, cudaStream_t stream) {
  using E = compute_t<T>;
  const int64_t steps = input.size(0), B = input.size(1), I = input.size(2),
                H = weight_hh.size(0) / 4, R = weight_hh.size(1);
  opwright::check(weight_hr.defined() || R == H,
                  "`weight_hh` must be [4 H, H], or `weight_hr` must project h to its width");
  opwright::check((keep_cells | keep_gates) >> 1 == 0,
                  "`keep_cells` and `keep_gates` must be 0 or 1");
  const bool norms = norm_c.defined();
  Scratch scratch;
  E* bias = scratch.take<E>(4 * H);
  const Layer<T> layer =
      layer_of(scratch, B, H, R, bias, peephole, norm_ih, norm_hh, norm_c, h_mask, lengths, reset,
               seed, activation, slope, coupled, clip, zoneout_h, zoneout_c, stream);
  const bool can_join = !h_mask.defined() && !zoneout_h && !norms;
  const Plan plan =
      weight_hr.defined() && !can_join ? Plan{} : plan_for<T>(steps, H, B, tier, precision, norms);
  // The steps of a layer that is projected after all of them have h of H units.
  const bool is_joined = weight_hr.defined() && plan.blocks,
             projects = weight_hr.defined() && !is_joined;
  Layer<T> of_steps = layer;
  if (is_joined) of_steps.R = H;
  View<const T, 2> recurrent = weight_hh;
  if (is_joined) {
    T* const product = scratch.take<T>(4 * H * H);
    opwright::call("aten::mm.out", borrow(weight_hh), borrow(weight_hr),
                   borrow(product, {4 * H, H}));
    recurrent = matrix<T>(product, 4 * H, H);
  }
  const State<T> state{
      scratch.take<E>(B * H),
      scratch.take<T>(B * of_steps.R),
      scratch.take<T>(B * of_steps.R),
      projects ? scratch.take<T>(B * H) : nullptr,
      is_joined ? rows_of_steps(scratch.take<T>(steps * B * H), steps, B, H) : output,
      cells.numel() ? cells : View<T, 3>{},
      gates.numel() ? gates : View<T, 3>{}};
  const int64_t most = B * (H > R ? H : R);
  const Fill chunks =
      chunks_for(scratch, plan, groups_of(of_steps.R, kPerChunk<T>), Tagged<T>::kBuffers, 0);
  const auto begin = [&] {
    start<T><<<blocks_for(most > 4 * H ? most : 4 * H), kThreads, 0, stream>>>(
        of_steps, state, is_joined ? View<const T, 2>{} : h_0, c_0, bias_ih, bias_hh, bias, steps,
        reverse, chunks);
  };
  if (steps == 0) begin();

  int64_t at_once = kMostProductElements / (4 * H * B);
  at_once = at_once < 1 ? 1 : at_once > steps ? steps : at_once;
  E *from_input = scratch.take<E>(at_once * B * 4 * H), *from_h = scratch.take<E>(B * 4 * H);
  E* projected = projects ? scratch.take<E>(B * R) : nullptr;
  E* row_of_cells = norms ? scratch.take<E>(B * 3 * H) : nullptr;
  auto* moments_x = norms && plan.blocks
                        ? reinterpret_cast<Moments<E>*>(scratch.take<E>(2 * at_once * B))
                        : nullptr;
  const bool is_wide = rounds<T>(precision) && H >= kWide;
  const auto hh = is_wide ? contiguous<T>(recurrent) : borrow(recurrent);
  const auto operand = borrow(state.operand, {B, of_steps.R});
  const auto hr = weight_hr.defined() ? borrow(weight_hr).t() : opwright::Tensor();
  const auto cell_out = projects ? borrow(state.cell_out, {B, H}) : opwright::Tensor();
  auto whole = borrow(input);
  if (B > 1 && input.stride(0) != B * input.stride(1)) {  // its rows do not form a matrix
    auto copy = opwright::Tensor::empty<T>({steps, B, I});
    opwright::call("aten::copy_", copy, whole, false);
    whole = copy;
  }
  const auto kernel = norms      ? (projects ? step<T, true, true> : step<T, true, false>)
                      : projects ? step<T, false, true>
                                 : step<T, false, false>;
  const bool is_plain = layer.is_plain() && !norms && !projects && B * H <= kMostPlain;
  constexpr int N = kUnitsOfThread;
  const bool has_packs = H % N == 0 && has_adjacent<N>(state.output) &&
                         has_adjacent<N>(state.cells) && has_adjacent<N>(state.gates);
  const auto plain_kernel = has_packs ? step_plain<T, N> : step_plain<T, 1>;
  for (int64_t done = 0; done < steps; done += at_once) {
    const int64_t count = steps - done < at_once ? steps - done : at_once;
    const int64_t first =
        reverse ? steps - done - count : done;  // the earliest time of these steps
    const int64_t last = first + count - 1;
    const bool is_rest = done + count == steps;
    const auto rows =
        whole.view({count * B, I}, {B == 1 ? whole.stride(0) : whole.stride(1), whole.stride(2)},
                   first * whole.stride(0));
    multiply_all<T>(from_input, rows, borrow(weight_ih), precision);
    if (done == 0) begin();  // the GPU is busy meanwhile
    if (is_joined && h_0.defined()) {
      multiply<T>(from_h, borrow(h_0), borrow(weight_hh).t());
      add_first<T><<<blocks_for(B * 4 * H), kThreads, 0, stream>>>(of_steps, from_h, steps, reverse,
                                                                   first, count, from_input);
    }
    if (plan.blocks) {
      if (norms)
        row_moments<E><<<static_cast<unsigned>(count * B), kThreads, 0, stream>>>(from_input, 4 * H,
                                                                                  moments_x);
      if (done && chunks.count) cudaMemsetAsync(chunks.at, 0, chunks.count * sizeof(Chunk), stream);
      const GridSteps<T> all{of_steps,
                             state,
                             recurrent,
                             from_input,
                             moments_x,
                             reinterpret_cast<Chunk*>(chunks.at),
                             reverse ? last : first,
                             is_rest   ? -1
                             : reverse ? first - 1
                                       : last + 1,
                             static_cast<int>(count),
                             plan.slices,
                             reverse};
      if (steps_at_once(plan, all, stream)) continue;
    }
    for (int64_t s = 0; s < count; ++s) {
      const int64_t t = reverse ? first + count - 1 - s : first + s;
      const int64_t next = done + s + 1 == steps ? -1 : reverse ? t - 1 : t + 1;
      if (is_wide)
        multiply_all<T>(from_h, operand, hh, precision);
      else
        multiply<T>(from_h, operand, hh.t());
      const E* const x = from_input + (t - first) * B * 4 * H;
      if (is_plain)
        opwright::launch_behind(plain_kernel, blocks_for(has_packs ? B * H / N : B * H),
                                dim3(kThreads), 0, stream, of_steps, state, x, from_h, t);
      else
        opwright::launch_behind(kernel, norms ? dim3(static_cast<unsigned>(B)) : blocks_for(B * H),
                                dim3(kThreads), 0, stream, of_steps, state, x, from_h, t, next,
                                row_of_cells);
      if (projects) {
        multiply<T>(projected, cell_out, hr);
        project<T><<<blocks_for(B * R), kThreads, 0, stream>>>(layer, state, projected, t, next);
      }
    }
  }
  finish<T><<<blocks_for(most), kThreads, 0, stream>>>(of_steps, state,
                                                       is_joined ? View<T, 2>{} : h_n, c_n);
  if (is_joined) {
    opwright::call("aten::mm.out", borrow(state.output.data(), {steps * B, H}), hr,
                   borrow(output.data(), {steps * B, R}));
    take_last<T>
        <<<blocks_for(B * R), kThreads, 0, stream>>>(layer, h_0, output, steps, reverse, h_n);
  }
}
OPWRIGHT_KERNEL(lstm, float, double, opwright::half, opwright::bfloat16)

// Null for the gradient of an argument that was not given.
template <typename T, int R>
static T* data_of(const View<T, R>& view) {
  return view.numel() ? view.data() : nullptr;
}

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
                   View<T, 2> grad_norm_c, View<T, 2> grad_h_mask, cudaStream_t stream) {
  using E = compute_t<T>;
  const int64_t steps = input.size(0), B = input.size(1), I = input.size(2),
                H = weight_hh.size(0) / 4, R = weight_hh.size(1), rows = steps * B, width = 4 * H;
  opwright::check(weight_hr.defined() || R == H,
                  "`weight_hh` must be [4 H, H], or `weight_hr` must project h to its width");
  opwright::check((keep_cells | keep_gates) >> 1 == 0,
                  "`keep_cells` and `keep_gates` must be 0 or 1");
  const bool is_projected = weight_hr.defined(), is_normalised = norm_c.defined();
  Scratch scratch;
  const bool is_saved = gates.numel() && !is_normalised;
  E* bias = is_saved ? nullptr : scratch.take<E>(width);
  if (bias)
    sum_biases<T><<<blocks_for(width), kThreads, 0, stream>>>(bias_ih, bias_hh, width, bias);
  const Layer<T> layer =
      layer_of(scratch, B, H, R, bias, peephole, norm_ih, norm_hh, norm_c, h_mask, lengths, reset,
               seed, activation, slope, coupled, clip, zoneout_h, zoneout_c, stream);
  View<const T, 3> saved = is_saved ? gates : View<const T, 3>{};
  if (is_saved && !gates.is_contiguous()) {
    T* const copy = scratch.take<T>(rows * width);
    opwright::call("aten::copy_", borrow(copy, {steps, B, width}), borrow(gates), false);
    saved = rows_of_steps<const T>(copy, steps, B, width);
  }
  const Past<T> past{h_0,
                     output,
                     saved,
                     is_saved ? nullptr : scratch.take<E>(rows * width),
                     scratch.take<E>(rows * H),
                     steps,
                     reverse};

  // The operands of the products of all steps, as matrices. They are made when they are needed:
  // first of all the steps.
  const bool takes_all = !lengths.defined() && input.is_contiguous();
  opwright::Tensor x_rows, h_rows;
  const auto make_operands = [&] {
    if (takes_all) {
      x_rows = borrow(input).view({rows, I}, {I, 1});
    } else {
      T* x = scratch.take<T>(rows * I);
      input_rows<T><<<blocks_for(rows * I), kThreads, 0, stream>>>(layer, input, x);
      x_rows = borrow(x, {rows, I});
    }
    T* h = scratch.take<T>(rows * R);
    if (layer.is_plain() && output.is_contiguous() && (!h_0.defined() || h_0.is_contiguous()) &&
        steps) {
      const int64_t one = B * R * int64_t{sizeof(T)}, others = (steps - 1) * one;
      const auto copy = [&](T* to, const T* from, int64_t bytes) {
        const auto code = from ? cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream)
                               : cudaMemsetAsync(to, 0, bytes, stream);
        opwright::check(code == cudaSuccess, "memory could not be copied");
      };
      copy(h + (reverse ? (steps - 1) * B * R : 0), h_0.data(), one);
      copy(h + (reverse ? 0 : B * R), output.data() + (reverse ? B * R : 0), others);
    } else {
      operand_rows<T><<<blocks_for(rows * R), kThreads, 0, stream>>>(layer, past, h);
    }
    h_rows = borrow(h, {rows, R});
  };
  const auto ih = borrow(weight_ih), hh = borrow(weight_hh);
  E *from_input = nullptr, *from_h = nullptr;
  Moments<E>*moments_x = nullptr, *moments_h = nullptr, *moments_c = nullptr;
  if (!is_saved) {
    make_operands();
    from_input = scratch.take<E>(rows * width), from_h = scratch.take<E>(rows * width);
    multiply_all<T>(from_input, x_rows, ih, precision);
    if (gates.numel())
      widen<T><<<blocks_for(rows * width), kThreads, 0, stream>>>(gates, from_h);
    else
      multiply_all<T>(from_h, h_rows, hh, precision);
  }
  const dim3 each_row(static_cast<unsigned>(rows));
  if (is_normalised) {
    const auto take = [&] { return reinterpret_cast<Moments<E>*>(scratch.take<E>(2 * rows)); };
    moments_x = take(), moments_h = take(), moments_c = take();
    row_moments<E><<<each_row, kThreads, 0, stream>>>(from_input, width, moments_x);
    row_moments<E><<<each_row, kThreads, 0, stream>>>(from_h, width, moments_h);
  }
  const auto cells = is_normalised      ? scan<T, true, false>
                     : layer.is_plain() ? scan<T, false, true>
                                        : scan<T, false, false>;
  constexpr int kFew = 64;  // threads of a block; each takes many steps
  cells<<<static_cast<unsigned>((B * H + kFew - 1) / kFew), kFew, 0, stream>>>(
      layer, past, c_0, from_input, from_h, moments_x, moments_h);
  if (is_normalised) cell_moments<T><<<each_row, kThreads, 0, stream>>>(layer, past, moments_c);

  const auto if_ = [&](bool is_there, int64_t count) {
    return is_there ? scratch.take<E>(count) : nullptr;
  };
  const bool can_join = !h_mask.defined() && !zoneout_h && !is_normalised;
  const Plan plan =
      is_projected && !can_join ? Plan{} : plan_for<T>(steps, H, B, tier, precision, is_normalised);
  const bool is_joined = is_projected && plan.blocks, projects = is_projected && !is_joined;
  Layer<T> of_steps = layer;
  View<const T, 2> recurrent = weight_hh;
  View<const T, 3> grad_out = grad_output;
  T* of_projected = is_projected ? scratch.take<T>(rows * R) : nullptr;
  T* of_cells = is_projected ? scratch.take<T>(rows * H) : nullptr;
  if (is_joined) {
    of_steps.R = H;
    T *const product = scratch.take<T>(4 * H * H), *const grads = scratch.take<T>(rows * H);
    opwright::call("aten::mm.out", hh, borrow(weight_hr), borrow(product, {4 * H, H}));
    recurrent = matrix<T>(product, 4 * H, H);
    grads_of_outputs<T><<<blocks_for(rows * R), kThreads, 0, stream>>>(layer, grad_output, grad_h_n,
                                                                       reverse, of_projected);
    opwright::call("aten::mm.out", borrow(of_projected, {rows, R}), borrow(weight_hr),
                   borrow(grads, {rows, H}));
    grad_out = rows_of_steps<const T>(grads, steps, B, H);
    cell_outs<T><<<blocks_for(rows * H), kThreads, 0, stream>>>(layer, past, of_cells);
  }
  // The product of a step has few rows and columns. In parts it takes more multiprocessors.
  constexpr int64_t kMostInParts = int64_t{1} << 20;
  const bool is_in_parts = kIsNarrow<T> && !plan.blocks && B * of_steps.R < kMostInParts;
  const Sweep<T> sweep{grad_out,
                       grad_cells.numel() ? grad_cells : View<const T, 3>{},
                       scratch.take<E>(B * of_steps.R),
                       scratch.take<E>(B * H),
                       scratch.take<E>((is_in_parts ? kParts : 1) * B * of_steps.R),
                       is_in_parts,
                       if_(h_mask.defined(), B * R),
                       if_(peephole.defined(), 3 * B * H),
                       scratch.take<T>(rows * width),
                       if_(is_normalised, rows * width),
                       if_(is_normalised, rows * H),
                       if_(is_normalised, rows * H),
                       of_projected,
                       of_cells,
                       if_(projects, B * H),
                       moments_h,
                       moments_c,
                       from_h};
  const int64_t most = B * (H > R ? H : R);
  const Fill chunks =
      chunks_for(scratch, plan, groups_of(H, kUnitsOfChunk<T>), Marked::kBuffers, Marked::kNone);
  begin_back<T><<<blocks_for(most), kThreads, 0, stream>>>(
      of_steps, sweep, is_joined ? View<const T, 2>{} : grad_h_n, grad_c_n, chunks);
  const auto kernel = is_normalised
                          ? (projects ? step_back<T, true, true> : step_back<T, true, false>)
                      : projects ? step_back<T, false, true>
                                 : step_back<T, false, false>;
  const bool is_plain = layer.is_plain() && !is_normalised && !projects && B * H <= kMostPlain;
  constexpr int N = kUnitsOfThread;
  const bool has_packs =
      H % N == 0 && has_adjacent<N>(sweep.grad_output) && has_adjacent<N>(past.saved);
  const auto plain_kernel = has_packs ? step_back_plain<T, N> : step_back_plain<T, 1>;
  const auto hr = projects ? borrow(weight_hr) : opwright::Tensor();
  const bool is_wide = rounds<T>(precision) && H >= kWide;
  const auto hh_of_steps = is_wide ? contiguous<T>(turned(recurrent)) : borrow(recurrent);
  int64_t after = -1;
  const GridSweep<T> all{of_steps,   past, sweep, recurrent, reinterpret_cast<Chunk*>(chunks.at),
                         plan.slices};
  const bool is_done = plan.blocks && sweep_at_once(plan, all, stream);
  if (is_done) after = reverse ? steps - 1 : 0;
  for (int64_t s = steps - 1; s >= 0 && !is_done; --s) {
    const int64_t t = reverse ? steps - 1 - s : s;
    if (projects) {
      project_back<T><<<blocks_for(B * R), kThreads, 0, stream>>>(layer, past, sweep, t, after);
      multiply<T>(sweep.to_cell_out, borrow(sweep.projected + t * B * R, {B, R}), hr);
    }
    if (is_plain)
      opwright::launch_behind(plain_kernel, blocks_for(has_packs ? B * H / N : B * H),
                              dim3(kThreads), 0, stream, of_steps, past, sweep, t, after);
    else
      opwright::launch_behind(kernel,
                              is_normalised ? dim3(static_cast<unsigned>(B)) : blocks_for(B * H),
                              dim3(kThreads), 0, stream, of_steps, past, sweep, t, after);
    const auto gates_of_step = borrow(sweep.gates + t * B * width, {B, width});
    if (is_wide)
      multiply_all<T>(sweep.to_h, gates_of_step, hh_of_steps, precision);
    else if (is_in_parts)
      multiply_in_parts<T>(sweep.to_h, gates_of_step, hh_of_steps, kParts);
    else
      multiply<T>(sweep.to_h, gates_of_step, hh_of_steps);
    after = t;
  }
  finish_back<T><<<blocks_for(most), kThreads, 0, stream>>>(
      of_steps, past, sweep, after, is_joined ? View<T, 2>{} : grad_h_0, grad_c_0, grad_h_mask);
  if (is_joined) {
    E* const through_gates = scratch.take<E>(rows * R);
    multiply<T>(through_gates, borrow(sweep.gates, {rows, width}), hh);
    grads_of_projected<T><<<blocks_for(rows * R), kThreads, 0, stream>>>(
        layer, through_gates, grad_h_n, steps, reverse, of_projected, grad_h_0);
  }

  // What takes all steps at once.
  if (is_saved) make_operands();
  T* to_input = sweep.gates;
  if (is_normalised) {
    to_input = scratch.take<T>(rows * width);
    normalise_back<T><<<each_row, kThreads, 0, stream>>>(sweep.before_norm, from_input, moments_x,
                                                         layer.norm_ih, width, to_input);
  }
  const auto grad_rows = borrow(to_input, {rows, width}),
             grad_h_rows = borrow(sweep.gates, {rows, width});
  if constexpr (opwright::detail::kSame<T, float>)
    multiply_all<T>(grad_input.data(), grad_rows, ih.t(), precision);
  else
    opwright::call("aten::mm.out", grad_rows, ih, borrow(grad_input.data(), {rows, I}));
  // The gradient of a weight: to = grads^T operands.
  const auto multiply_rows = [&](T* to, const opwright::Tensor& grads,
                                 const opwright::Tensor& operands) {
    const int64_t columns = operands.size(1);
    if constexpr (opwright::detail::kSame<T, float>) {
      // A convolution copies both, which wide layers make up for. By hand: an H100 needs 275 us
      // with TF32 and 662 without for 4,096 rows, 1,024 columns and as many units, but 86 and 26
      // for 128.
      constexpr int64_t kCopied = 80;
      if (kCopied * (width + columns) < H * columns)
        return multiply_all<T>(to, grads.t(), operands.t(), precision);
    }
    opwright::call("aten::mm.out", grads.t(), operands, borrow(to, {width, columns}));
  };
  multiply_rows(grad_weight_ih.data(), grad_rows, x_rows);
  multiply_rows(grad_weight_hh.data(), grad_h_rows, h_rows);
  if (is_projected)
    opwright::call("aten::mm.out", borrow(sweep.projected, {rows, R}).t(),
                   borrow(sweep.cell_out, {rows, H}), borrow(grad_weight_hr));
  constexpr int64_t kMostParts = 64, kRowsOfPart = 64, kPer = 4;
  E* sums = scratch.take<E>(kMostParts * width);
  const auto sum = [&](const auto* from, const E* times, const Moments<E>* of, int64_t count,
                       int64_t columns, T* a, T* b) {
    const int64_t wanted = up(count, kRowsOfPart), per = columns % kPer ? 1 : kPer;
    const int parts = static_cast<int>(wanted < 1 ? 1 : wanted < kMostParts ? wanted : kMostParts);
    const dim3 grid(static_cast<unsigned>(up(columns, 32 * per)), parts);
    const auto kernel = [&](auto* kernel) {
      kernel<<<grid, kThreads, 0, stream>>>(from, times, of, count, columns, sums);
    };
    using S = std::remove_cvref_t<decltype(*from)>;
    per == kPer ? kernel(sum_columns<kPer, E, S>) : kernel(sum_columns<1, E, S>);
    join_sums<T><<<blocks_for(columns), kThreads, 0, stream>>>(sums, parts, columns, a, b);
  };
  T *const to_ih = data_of(grad_bias_ih), *const to_hh = data_of(grad_bias_hh),
           *const none = nullptr;
  if (is_normalised) {
    sum(sweep.before_norm, nullptr, nullptr, rows, width, to_ih, to_hh);
    sum(sweep.before_norm, from_input, moments_x, rows, width, data_of(grad_norm_ih), none);
    sum(sweep.before_norm, from_h, moments_h, rows, width, data_of(grad_norm_hh), none);
    sum(sweep.normal_unit, nullptr, nullptr, rows, H, grad_norm_c.data(), none);
    sum(sweep.normal, nullptr, nullptr, rows, H, grad_norm_c.data() + H, none);
  } else if (to_ih || to_hh) {
    sum(sweep.gates, nullptr, nullptr, rows, width, to_ih, to_hh);
  }
  for (int64_t k = 0; peephole.defined() && k < 3; ++k)
    sum(sweep.of_peephole + k * B * H, nullptr, nullptr, B, H, grad_peephole.data() + k * H, none);
}
OPWRIGHT_KERNEL(lstm_backward, float, double, opwright::half, opwright::bfloat16)
