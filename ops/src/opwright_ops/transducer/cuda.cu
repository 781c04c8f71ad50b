// The scores of a transducer's rows, the sum over its alignments and its joint, on a GPU.
#include <opwright/kernel.h>
#include <opwright/scratch.h>
#include <opwright/tensor.h>

#include "../cross_entropy/gpu_rows.cuh"
#include "gpu_join.cuh"
#if !OPWRIGHT_ONLY_16BIT  // what is the same for all types is not compiled twice
#include "gpu_lattice.cuh"
#endif

using namespace opwright_ops;
using opwright::with_adjacent_columns;

namespace {

struct Scores {
  static constexpr bool kHasElements = false, kSkipsRows = true;
  int64_t v, blank;
  View<const int64_t, 1> labels;
  double *blank_score, *label_score, *normalizer;

  __device__ OPWRIGHT_INLINE bool is_used(int64_t row) const { return labels(row) != v + 1; }
  __device__ OPWRIGHT_INLINE void empty(int64_t row) const {
    blank_score[row] = label_score[row] = normalizer[row] = 0;
  }
  template <typename T>
  __device__ OPWRIGHT_INLINE void operator()(int64_t row, const T* from, double value,
                                             double) const {
    const int64_t label = labels(row);
    assert(0 <= label && label <= v && "a target is outside of the vocabulary");
    normalizer[row] = value;
    blank_score[row] = double(compute_t<T>(from[blank])) - value;
    label_score[row] = label < v ? double(compute_t<T>(from[label])) - value : 0;
  }
};

template <typename S>
struct ScoresGradient {
  static constexpr int kColumns = 2;
  static constexpr bool kSkipsRows = true;
  int64_t v, blank;
  View<const int64_t, 1> labels;
  View<const double, 1> of_blank, of_label, normalizer;

  __device__ OPWRIGHT_INLINE bool is_used(int64_t row) const { return labels(row) != v + 1; }
  __device__ OPWRIGHT_INLINE RowGradient<S> of(int64_t row) const {
    const int64_t label = labels(row);
    const double by_blank = of_blank(row), by_label = label < v ? of_label(row) : 0;
    return {.normalizer = normalizer(row),
            .grad = 1,
            .slope = S(-(by_blank + by_label)),
            .shift = 0,
            .at = {blank, label < v && label != blank ? label : -1},
            .minus = {S(-by_blank - (label == blank ? by_label : 0)), S(-by_label)},
            .is_zero = label == v + 1};
  }
};

}  // namespace

template <typename T>
void transducer_scores(View<const T, 2> logits, View<const int64_t, 1> labels, int64_t blank,
                       View<double, 1> blank_score, View<double, 1> label_score,
                       View<double, 1> normalizer, cudaStream_t stream) {
  const int64_t v = logits.size(1);
  launch_forward(with_adjacent_columns(logits),
                 Scores{.v = v,
                        .blank = opwright::check_index(blank, v),
                        .labels = labels,
                        .blank_score = blank_score.data(),
                        .label_score = label_score.data(),
                        .normalizer = normalizer.data()},
                 stream);
}

template <typename T>
void transducer_scores_backward(View<const double, 1> grad_blank_score,
                                View<const double, 1> grad_label_score, View<const T, 2> logits,
                                View<const int64_t, 1> labels, View<const double, 1> normalizer,
                                int64_t blank, View<T, 2> grad_logits, cudaStream_t stream) {
  const int64_t v = logits.size(1);
  launch_backward(with_adjacent_columns(logits), grad_logits,
                  ScoresGradient<compute_t<T>>{.v = v,
                                               .blank = opwright::check_index(blank, v),
                                               .labels = labels,
                                               .of_blank = grad_blank_score,
                                               .of_label = grad_label_score,
                                               .normalizer = normalizer},
                  stream);
}

template <typename T>
void transducer_scores_gradient_(View<T, 2> logits, View<const double, 1> grad_blank_score,
                                 View<const double, 1> grad_label_score,
                                 View<const int64_t, 1> labels, View<const double, 1> normalizer,
                                 int64_t blank, cudaStream_t stream) {
  opwright::in_adjacent_columns(logits, [&](const View<const T, 2>& from, const View<T, 2>& to) {
    transducer_scores_backward<T>(grad_blank_score, grad_label_score, from, labels, normalizer,
                                  blank, to, stream);
  });
}

template <typename T>
void transducer_join(View<const T, 3> f, View<const T, 3> g, View<const int64_t, 1> logit_lengths,
                     View<const int64_t, 1> target_lengths, int64_t count, bool is_packed,
                     Activation activation, View<T, 2> output, cudaStream_t stream) {
  constexpr int N = kPackWidth<T>;
  const int64_t b = f.size(0), frames = f.size(1), positions = g.size(1), h = f.size(2);
  opwright::check(b * frames > 0, kWrongCount);
  const Batch batch{logit_lengths, target_lengths, count, positions - 1, is_packed ? 0 : frames};
  const Vectors<T> from_f = vectors_of(f), from_g = vectors_of(g);
  const bool has_packs = h % N == 0 && are_packs(from_f) && are_packs(from_g) &&
                         opwright::is_aligned(output.data(), N);
  const int64_t packs = has_packs ? h / N : h;
  const int64_t warps = (packs + kWarp - 1) / kWarp;
  const int across = warps * kWarp < kRowThreads ? static_cast<int>(warps * kWarp) : kRowThreads;
  const int beside = kRowThreads / across;
  // Positions are split where there are too few frames for all multiprocessors.
  const int64_t wanted = kJoinBlocks * opwright::current_device().multiprocessors / (b * frames);
  const int64_t most = (positions + 4 * beside - 1) / (4 * beside);
  const int64_t splits = wanted < 1 ? 1 : wanted < most ? wanted : most;
  opwright::launch_behind(has_packs ? join_kernel<N, T> : join_kernel<1, T>,
                          dim3(static_cast<unsigned>(b * frames), static_cast<unsigned>(splits)),
                          dim3(across, beside), 0, stream, batch, frames, h, from_f, from_g,
                          activation, output.data());
}

template <typename T>
void transducer_join_backward(View<const T, 2> grad_output, View<const T, 3> f, View<const T, 3> g,
                              View<const int64_t, 1> logit_lengths,
                              View<const int64_t, 1> target_lengths, int64_t count, bool is_packed,
                              Activation activation, View<T, 3> grad_f, View<T, 3> grad_g,
                              cudaStream_t stream) {
  constexpr int N = kPackWidth<T>;
  const int64_t b = f.size(0), frames = f.size(1), positions = g.size(1), h = f.size(2);
  const Batch batch{logit_lengths, target_lengths, count, positions - 1, is_packed ? 0 : frames};
  const Vectors<T> from_f = vectors_of(f), from_g = vectors_of(g);
  const RowsOf<const T> grad = rows_of(with_adjacent_columns(grad_output));
  const bool has_packs = h % N == 0 && are_packs(from_f) && are_packs(from_g) &&
                         are_aligned(grad) && opwright::is_aligned(grad_g.data(), N);
  const auto start = [&]<int kWidth, int kLanes>() {
    constexpr int kColumns = kWidth * kLanes;
    using S = compute_t<T>;
    const int64_t across = b * ((h + kColumns - 1) / kColumns);
    // Frames are split where there are too few columns for all multiprocessors.
    const int64_t wanted =
        kJoinBackwardBlocks * opwright::current_device().multiprocessors / across;
    const int64_t most = (frames + kMinFrames - 1) / kMinFrames;
    const int64_t parts = wanted < 1 ? 1 : wanted < most ? wanted : most;
    const int64_t frames_of_block =
        (frames + parts * kFramesAtOnce - 1) / (parts * kFramesAtOnce) * kFramesAtOnce;
    const int64_t splits = (frames + frames_of_block - 1) / frames_of_block;
    const bool is_one_pass = positions <= kRowThreads / kLanes * kHeldPositions;
    S* partial_f = is_one_pass ? nullptr : opwright::scratch<S>(b * frames * h);
    S* partial_g = splits == 1 ? nullptr : opwright::scratch<S>(splits * grad_g.numel());
    opwright::launch_behind(join_backward_kernel<kWidth, kLanes, T>,
                            dim3(static_cast<unsigned>(across), static_cast<unsigned>(splits)),
                            dim3(kRowThreads), 0, stream, batch, frames, positions, h, from_f,
                            from_g, activation, grad, frames_of_block, partial_f, partial_g,
                            grad_f.data(), grad_g.data());
    opwright::sum_partials(opwright::Partials<S>{partial_g, static_cast<int32_t>(splits), false},
                           grad_g.numel(), View<T, 1>{grad_g.data(), {grad_g.numel()}, {1}},
                           stream);
  };
  has_packs ? start.template operator()<N, 8>() : start.template operator()<1, 32>();
}

#if !OPWRIGHT_ONLY_16BIT

void transducer_columns(View<const int64_t, 2> targets, View<const int64_t, 1> logit_lengths,
                        View<const int64_t, 1> target_lengths, int64_t count, int64_t classes,
                        int64_t frames, int64_t star_index, View<int64_t, 1> output,
                        cudaStream_t stream) {
  const int64_t b = targets.size(0);
  opwright::check(b > 0, kWrongCount);
  const int64_t parts = count / (b * 4 * kRowThreads) + 1;
  const Batch batch{logit_lengths, target_lengths, count, targets.size(1), frames};
  opwright::launch_behind(columns_kernel, dim3(static_cast<unsigned>(b * parts)), dim3(kRowThreads),
                          0, stream, batch, parts, targets, classes, star_index, output.data());
}

void transducer_lattice(View<const double, 1> blank_score, View<const double, 1> label_score,
                        View<const int64_t, 2> targets, View<const int64_t, 1> logit_lengths,
                        View<const int64_t, 1> target_lengths, int64_t frames, double delay_penalty,
                        double eos_penalty, int64_t eos_index, double star_penalty,
                        int64_t star_index, View<double, 1> loss, View<double, 1> beta,
                        cudaStream_t stream) {
  const int64_t b = targets.size(0), labels = targets.size(1);
  const Batch batch{logit_lengths, target_lengths, blank_score.size(0), labels, frames};
  const Steps steps{blank_score, label_score,  targets,   delay_penalty,
                    eos_penalty, star_penalty, eos_index, star_index};
  clear_unused(beta, frames, stream);
  opwright::launch_behind(lattice_kernel, dim3(static_cast<unsigned>(b)), lattice_block(labels), 0,
                          stream, batch, steps, loss.data(), beta.data());
}

void transducer_lattice_backward(View<const double, 1> grad_loss, View<const double, 1> blank_score,
                                 View<const double, 1> label_score, View<const int64_t, 2> targets,
                                 View<const int64_t, 1> logit_lengths,
                                 View<const int64_t, 1> target_lengths, View<const double, 1> beta,
                                 int64_t frames, double delay_penalty, double eos_penalty,
                                 int64_t eos_index, double star_penalty, int64_t star_index,
                                 View<double, 1> grad_blank_score, View<double, 1> grad_label_score,
                                 cudaStream_t stream) {
  const int64_t b = targets.size(0), labels = targets.size(1), rows = blank_score.size(0);
  const Batch batch{logit_lengths, target_lengths, rows, labels, frames};
  const Steps steps{blank_score, label_score,  targets,   delay_penalty,
                    eos_penalty, star_penalty, eos_index, star_index};
  double* border = labels < kMaxPositions ? nullptr : opwright::scratch<double>(rows);
  clear_unused(grad_blank_score, frames, stream);
  clear_unused(grad_label_score, frames, stream);
  opwright::launch_behind(lattice_backward_kernel, dim3(static_cast<unsigned>(b)),
                          lattice_block(labels), 0, stream, batch, steps, grad_loss, beta, border,
                          grad_blank_score.data(), grad_label_score.data());
}

#endif

OPWRIGHT_KERNEL(transducer_columns)
OPWRIGHT_KERNEL(transducer_scores, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(transducer_scores_backward, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(transducer_scores_gradient_, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(transducer_lattice)
OPWRIGHT_KERNEL(transducer_lattice_backward)
OPWRIGHT_KERNEL(transducer_join, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(transducer_join_backward, float, double, opwright::half, opwright::bfloat16)
