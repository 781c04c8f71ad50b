// The scores of a transducer's rows, the sum over its alignments and its joint, on the CPU.
#include <opwright/kernel.h>
#include <opwright/math.h>
#include <opwright/scratch.h>

#include "../cross_entropy/cpu_rows.h"
#include "rows.h"

using namespace opwright_ops;
using opwright::check;

namespace {

constexpr int64_t kCellElements = 16;  // a cell of the lattice takes as long as so many elements

double log_sum(double a, double b) {
  const double most = a > b ? a : b, least = a > b ? b : a;
  if (least == kImpossible) return most;
  return most + __builtin_log1p(__builtin_exp(least - most));
}

// The rows of every utterance; packed if `frames` is 0. `u` is the number of columns of targets.
const Rows* rows_of_batch(int64_t rows, int64_t u, const View<const int64_t, 1>& logit_lengths,
                          const View<const int64_t, 1>& target_lengths, int64_t frames) {
  const int64_t b = logit_lengths.size(0);
  auto* all = opwright::scratch<Rows>(b);
  int64_t first = 0;
  for (int64_t i = 0; i < b; ++i) {
    const int64_t t = logit_lengths(i), labels = target_lengths(i);
    check(1 <= t && t <= (frames ? frames : rows),
          "`logit_lengths` must be at least 1, and at most the number of frames");
    check(0 <= labels && labels <= u,
          "`target_lengths` must be at least 0, and at most the number of columns of "
          "`targets`");
    const int64_t width = frames ? u + 1 : labels + 1;
    all[i] = {first, width, t, labels + 1};
    first += (frames ? frames : t) * width;
  }
  check(first == rows, kWrongCount);
  return all;
}

void check_labels(const View<const int64_t, 1>& labels, int64_t v) {
  for (int64_t row = 0; row < labels.size(0); ++row)
    check(0 <= labels(row) && labels(row) <= v + 1,
          "IndexError: a target or `blank` is outside of the vocabulary");
}

}  // namespace

void transducer_columns(View<const int64_t, 2> targets, View<const int64_t, 1> logit_lengths,
                        View<const int64_t, 1> target_lengths, int64_t count, int64_t classes,
                        int64_t frames, int64_t star_index, View<int64_t, 1> output) {
  const Rows* all = rows_of_batch(count, targets.size(1), logit_lengths, target_lengths, frames);
  for (int64_t row = 0; row < count; ++row) output(row) = classes + 1;
  for (int64_t entry = 0; entry < targets.size(0); ++entry) {
    const Rows& rows = all[entry];
    for (int64_t u = 0; u < rows.positions; ++u) {
      int64_t column = classes;
      if (u < rows.positions - 1 && (star_index < 0 || targets(entry, u) != star_index)) {
        const int64_t label = targets(entry, u);
        column = 0 <= label && label < classes ? label : classes + 2;
      }
      for (int64_t t = 0; t < rows.frames; ++t) output(rows.at(t, u)) = column;
    }
  }
}

template <typename T>
void transducer_scores(View<const T, 2> logits, View<const int64_t, 1> labels, int64_t blank,
                       View<double, 1> blank_score, View<double, 1> label_score,
                       View<double, 1> normalizer) {
  const int64_t v = logits.size(1);
  blank = opwright::check_index(blank, v);
  check_labels(labels, v);
  for (int64_t row = 0; row < labels.size(0); ++row) {
    if (labels(row) == v + 1) blank_score(row) = label_score(row) = normalizer(row) = 0;
  }
  const auto score = [&](int64_t row, double sum, double) {
    const int64_t label = labels(row);
    normalizer(row) = sum;
    blank_score(row) = double(compute_t<T>(logits(row, blank))) - sum;
    label_score(row) = label < v ? double(compute_t<T>(logits(row, label))) - sum : 0;
  };
  over_rows<false>(opwright::with_adjacent_columns(logits), score,
                   [&](int64_t row) { return labels(row) != v + 1; });
}

template <typename T>
void transducer_scores_backward(View<const double, 1> grad_blank_score,
                                View<const double, 1> grad_label_score, View<const T, 2> logits,
                                View<const int64_t, 1> labels, View<const double, 1> normalizer,
                                int64_t blank, View<T, 2> grad_logits) {
  const int64_t v = logits.size(1);
  blank = opwright::check_index(blank, v);
  check_labels(labels, v);
  write_gradients(
      opwright::with_adjacent_columns(logits), normalizer, grad_logits, [&](int64_t row) {
        const int64_t label = labels(row);
        const bool is_labelled = label < v;
        const double of_blank = grad_blank_score(row);
        const double of_label = is_labelled ? grad_label_score(row) : 0;
        RowGradient gradient{.grad = 1, .slope = -(of_blank + of_label), .is_zero = label == v + 1};
        gradient.columns[0] = {blank, -of_blank};
        if (label == blank)
          gradient.columns[0].subtracted -= of_label;
        else if (is_labelled)
          gradient.columns[1] = {label, -of_label};
        return gradient;
      });
}

template <typename T>
void transducer_scores_gradient_(View<T, 2> logits, View<const double, 1> grad_blank_score,
                                 View<const double, 1> grad_label_score,
                                 View<const int64_t, 1> labels, View<const double, 1> normalizer,
                                 int64_t blank) {
  opwright::in_adjacent_columns(logits, [&](const View<const T, 2>& from, const View<T, 2>& to) {
    transducer_scores_backward<T>(grad_blank_score, grad_label_score, from, labels, normalizer,
                                  blank, to);
  });
}

namespace {

void sum_ahead(const Steps& steps, const Rows& rows, int64_t entry, const View<double, 1>& beta) {
  for (int64_t t = rows.frames - 1; t >= 0; --t) {
    for (int64_t u = rows.positions - 1; u >= 0; --u) {
      const bool is_end = u == rows.positions - 1;
      const int64_t row = rows.at(t, u);
      const Position position = steps.position(rows, entry, u);
      double sum = is_end ? 0 : kImpossible;
      if (t < rows.frames - 1) sum = beta(rows.at(t + 1, u));
      sum += steps.blank(position, steps.blank_score(row));
      if (!is_end) {
        const double up = steps.label(position, steps.label_score(row), rows, t);
        sum = log_sum(sum, beta(rows.at(t, u + 1)) + up);
      }
      beta(row) = sum;
    }
  }
}

// Shares `grad` out among the steps of all alignments, from the start on: each row gives what comes
// to it to its two steps, in the proportion of exp(step + sum ahead).
void share_out(const Steps& steps, const Rows& rows, int64_t entry,
               const View<const double, 1>& beta, double grad, const View<double, 1>& of_blank,
               const View<double, 1>& of_label) {
  for (int64_t t = 0; t < rows.frames; ++t) {
    for (int64_t u = 0; u < rows.positions; ++u) {
      const int64_t row = rows.at(t, u);
      const bool is_last = t == rows.frames - 1, is_end = u == rows.positions - 1;
      const Position position = steps.position(rows, entry, u);
      double comes = t == 0 && u == 0 ? grad : 0;
      if (t > 0) comes += of_blank(rows.at(t - 1, u));
      if (u > 0) comes += of_label(rows.at(t, u - 1));
      double ahead = !is_last ? beta(rows.at(t + 1, u)) : is_end ? 0 : kImpossible;
      double up = is_end ? kImpossible : beta(rows.at(t, u + 1));
      ahead += steps.blank(position, steps.blank_score(row));
      if (!is_end) up += steps.label(position, steps.label_score(row), rows, t);
      of_blank(row) = ahead == kImpossible ? 0 : comes / (1 + opwright::exp(up - ahead));
      of_label(row) = up == kImpossible ? 0 : comes / (1 + opwright::exp(ahead - up));
    }
  }
  if (steps.star_index < 0) return;
  for (int64_t u = 0; u < rows.positions - 1; ++u) {  // scores that were replaced
    if (!steps.position(rows, entry, u).is_star) continue;
    for (int64_t t = 0; t < rows.frames; ++t)
      of_label(rows.at(t, u)) = of_blank(rows.at(t, u + 1)) = 0;
  }
}

}  // namespace

void transducer_lattice(View<const double, 1> blank_score, View<const double, 1> label_score,
                        View<const int64_t, 2> targets, View<const int64_t, 1> logit_lengths,
                        View<const int64_t, 1> target_lengths, int64_t frames, double delay_penalty,
                        double eos_penalty, int64_t eos_index, double star_penalty,
                        int64_t star_index, View<double, 1> loss, View<double, 1> beta) {
  const int64_t count = blank_score.size(0), b = targets.size(0);
  const Rows* all = rows_of_batch(count, targets.size(1), logit_lengths, target_lengths, frames);
  const Steps steps{blank_score, label_score,  targets,   delay_penalty,
                    eos_penalty, star_penalty, eos_index, star_index};
  for (int64_t row = 0; row < (frames ? count : 0); ++row) beta(row) = 0;
  opwright::parallel_for(b, opwright::grain_of(kCellElements * (count / b)),
                         [&](int64_t begin, int64_t end) {
                           for (int64_t entry = begin; entry < end; ++entry) {
                             sum_ahead(steps, all[entry], entry, beta);
                             loss(entry) = -beta(all[entry].first);
                           }
                         });
}

void transducer_lattice_backward(View<const double, 1> grad_loss, View<const double, 1> blank_score,
                                 View<const double, 1> label_score, View<const int64_t, 2> targets,
                                 View<const int64_t, 1> logit_lengths,
                                 View<const int64_t, 1> target_lengths, View<const double, 1> beta,
                                 int64_t frames, double delay_penalty, double eos_penalty,
                                 int64_t eos_index, double star_penalty, int64_t star_index,
                                 View<double, 1> grad_blank_score,
                                 View<double, 1> grad_label_score) {
  const int64_t count = blank_score.size(0), b = targets.size(0);
  const Rows* all = rows_of_batch(count, targets.size(1), logit_lengths, target_lengths, frames);
  const Steps steps{blank_score, label_score,  targets,   delay_penalty,
                    eos_penalty, star_penalty, eos_index, star_index};
  for (int64_t row = 0; row < count; ++row) grad_blank_score(row) = grad_label_score(row) = 0;
  opwright::parallel_for(b, opwright::grain_of(kCellElements * (count / b)),
                         [&](int64_t begin, int64_t end) {
                           for (int64_t entry = begin; entry < end; ++entry)
                             share_out(steps, all[entry], entry, beta, -grad_loss(entry),
                                       grad_blank_score, grad_label_score);
                         });
}

namespace {

template <typename Body>
void with_activation(Activation activation, const Body& body) {
  if (activation == Activation::relu)
    body.template operator()<Activation::relu>();
  else if (activation == Activation::tanh)
    body.template operator()<Activation::tanh>();
  else
    body.template operator()<Activation::none>();
}

}  // namespace

// The rows that the frames of `f` and the positions of `g` make.
template <typename T>
const Rows* rows_of_joint(const View<const T, 3>& f, const View<const T, 3>& g,
                          const View<const int64_t, 1>& logit_lengths,
                          const View<const int64_t, 1>& target_lengths, int64_t count,
                          bool is_packed) {
  const int64_t frames = f.size(1);
  const Rows* all =
      rows_of_batch(count, g.size(1) - 1, logit_lengths, target_lengths, is_packed ? 0 : frames);
  for (int64_t entry = 0; entry < f.size(0); ++entry)
    check(all[entry].frames <= frames,
          "`logit_lengths` must be at most the number of frames of `f`");
  return all;
}

template <typename T>
void transducer_join(View<const T, 3> f, View<const T, 3> g, View<const int64_t, 1> logit_lengths,
                     View<const int64_t, 1> target_lengths, int64_t count, bool is_packed,
                     Activation activation, View<T, 2> output) {
  const int64_t b = f.size(0), frames = f.size(1), positions = g.size(1), h = f.size(2);
  const Rows* all = rows_of_joint(f, g, logit_lengths, target_lengths, count, is_packed);
  const Vectors<T> from_f = vectors_of(f), from_g = vectors_of(g);
  with_activation(activation, [&]<Activation kActivation>() {
    const int64_t grain = opwright::grain_of(positions * h);
    opwright::parallel_for(b * frames, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t entry = i / frames, t = i % frames;
        const Rows& rows = all[entry];
        for (int64_t u = 0; u < positions; ++u) {
          if (!rows.has(t, u) && is_packed) continue;
          T* to = output.data() + rows.at(t, u) * h;
          if (!rows.has(t, u)) {
            for (int64_t j = 0; j < h; ++j) to[j] = T(compute_t<T>(0));
            continue;
          }
          const T *x = from_f.at(entry, t), *y = from_g.at(entry, u);
          along<T>(h, [&]<typename R>(R, int64_t j) {
            write(to + j, activate<kActivation>(read<R>(x + j) + read<R>(y + j)));
          });
        }
      }
    });
  });
}

template <typename T>
void transducer_join_backward(View<const T, 2> grad_output, View<const T, 3> f, View<const T, 3> g,
                              View<const int64_t, 1> logit_lengths,
                              View<const int64_t, 1> target_lengths, int64_t count, bool is_packed,
                              Activation activation, View<T, 3> grad_f, View<T, 3> grad_g) {
  using S = compute_t<T>;
  // Columns that one piece of work covers: their sums for all positions stay in the first-level
  // cache, and each gradient is read once.
  constexpr int64_t kColumns = 64;
  const int64_t b = f.size(0), frames = f.size(1), positions = g.size(1), h = f.size(2);
  const Rows* all = rows_of_joint(f, g, logit_lengths, target_lengths, count, is_packed);
  const Vectors<T> from_f = vectors_of(f), from_g = vectors_of(g);
  const View<const T, 2> grads = opwright::with_adjacent_columns(grad_output);
  for (int64_t i = 0; i < grad_f.numel(); ++i) grad_f.data()[i] = T(S(0));
  with_activation(activation, [&]<Activation kActivation>() {
    const int64_t parts = (h + kColumns - 1) / kColumns;
    const int64_t grain = opwright::grain_of(2 * frames * positions * kColumns);
    opwright::parallel_for(b * parts, grain, [&](int64_t begin, int64_t end) {
      auto* sums = opwright::scratch<S>(positions * kColumns);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t entry = i / parts, first = i % parts * kColumns;
        const int64_t n = h - first < kColumns ? h - first : kColumns;
        const Rows& rows = all[entry];
        for (int64_t k = 0; k < positions * kColumns; ++k) sums[k] = 0;
        for (int64_t t = 0; t < rows.frames; ++t) {
          S of_frame[kColumns] = {};
          const T* x = from_f.at(entry, t) + first;
          for (int64_t u = 0; u < rows.positions; ++u) {
            const T* y = from_g.at(entry, u) + first;
            const T* from = grads.data() + rows.at(t, u) * grads.stride(0) + first;
            S* of_position = sums + u * kColumns;
            along<T>(n, [&]<typename R>(R, int64_t j) {
              const R total = read<R>(x + j) + read<R>(y + j);
              const R grad = pass_gradient<kActivation>(read<R>(from + j), total);
              write(of_frame + j, read<R>(of_frame + j) + grad);
              write(of_position + j, read<R>(of_position + j) + grad);
            });
          }
          T* to = grad_f.data() + (entry * frames + t) * h + first;
          along<T>(n, [&]<typename R>(R, int64_t j) { write(to + j, read<R>(of_frame + j)); });
        }
        for (int64_t u = 0; u < positions; ++u) {
          T* to = grad_g.data() + (entry * positions + u) * h + first;
          const S* from = sums + u * kColumns;
          along<T>(n, [&]<typename R>(R, int64_t j) { write(to + j, read<R>(from + j)); });
        }
      }
    });
  });
}

OPWRIGHT_KERNEL(transducer_columns)
OPWRIGHT_KERNEL(transducer_scores, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(transducer_scores_backward, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(transducer_scores_gradient_, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(transducer_lattice)
OPWRIGHT_KERNEL(transducer_lattice_backward)
OPWRIGHT_KERNEL(transducer_join, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(transducer_join_backward, float, double, opwright::half, opwright::bfloat16)
