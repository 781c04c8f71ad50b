// The rows of a batch of utterances, their steps and their joint, for CPU and GPU.
#pragma once

#include <opwright/math.h>
#include <opwright/scratch.h>
#include <opwright/tensor.h>
#include <opwright/view.h>

namespace opwright_ops {

using opwright::View;

constexpr const char* kWrongCount = "the number of rows is not that which the lengths make";
constexpr double kImpossible = -__builtin_inf();  // the score of a step that cannot be taken

// The rows of one utterance: frames that follow each other, `width` rows apart.
struct Rows {
  int64_t first, width, frames, positions;
  OPWRIGHT_HOST_DEVICE int64_t at(int64_t t, int64_t u) const { return first + t * width + u; }
  // Whether a row lies within the lengths.
  OPWRIGHT_HOST_DEVICE bool has(int64_t t, int64_t u) const { return t < frames && u < positions; }
};

// What the labels at a position make of the scores there.
struct Position {
  bool is_star = false, is_behind_star = false, is_eos = false;
};

// The scores of the steps from each row, and how they become those of the lattice.
struct Steps {
  View<const double, 1> blank_score, label_score;
  View<const int64_t, 2> targets;
  double delay_penalty, eos_penalty, star_penalty;
  int64_t eos_index, star_index;

  OPWRIGHT_HOST_DEVICE Position position(const Rows& rows, int64_t entry, int64_t u) const {
    Position position;
    if (u < rows.positions - 1) {
      const int64_t label = targets(entry, u);
      position.is_star = star_index >= 0 && label == star_index;
      position.is_eos = eos_index >= 0 && label == eos_index;
    }
    position.is_behind_star = star_index >= 0 && u > 0 && targets(entry, u - 1) == star_index;
    return position;
  }
  OPWRIGHT_HOST_DEVICE double blank(const Position& position, double score) const {
    return position.is_behind_star ? star_penalty : score;
  }
  OPWRIGHT_HOST_DEVICE double label(const Position& position, double score, const Rows& rows,
                                    int64_t t) const {
    const double early = double(rows.frames - 1) / 2 - double(t);
    if (position.is_star) score = 0;
    score += delay_penalty * early;
    if (position.is_eos) score += eos_penalty * early;
    return score;
  }
};

// What the activation of a joint makes of a sum, and its derivative there.
template <Activation kActivation, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V activate(V x) {
  if constexpr (kActivation == Activation::relu) return opwright::select(x <= V{}, V{}, x);
  if constexpr (kActivation == Activation::tanh) return opwright::tanh(x);
  return x;
}
template <Activation kActivation, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V pass_gradient(V grad, V x) {
  if constexpr (kActivation == Activation::relu) return opwright::select(x > V{}, grad, V{});
  if constexpr (kActivation == Activation::tanh) {
    const V y = opwright::tanh(x);
    return grad * (1 - y * y);
  }
  return grad;
}

// Vectors of adjacent elements for each entry and step. One entry, or one step, has the stride 0.
template <typename T>
struct Vectors {
  const T* data;
  int64_t entry_stride, step_stride;
  OPWRIGHT_HOST_DEVICE const T* at(int64_t entry, int64_t step) const {
    return data + entry * entry_stride + step * step_stride;
  }
};

template <typename T>
Vectors<T> vectors_of(const View<const T, 3>& view) {
  const int64_t b = view.size(0), steps = view.size(1), h = view.size(2);
  if (h == 1 || view.stride(2) == 1)
    return {view.data(), b == 1 ? 0 : view.stride(0), steps == 1 ? 0 : view.stride(1)};
  T* copy = opwright::scratch<T>(b * steps * h);
  opwright::call("aten::copy_", opwright::borrow(copy, {b, steps, h}), opwright::borrow(view),
                 false);
  return {copy, steps * h, h};
}

}  // namespace opwright_ops
