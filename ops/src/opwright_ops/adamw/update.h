// The factors of one step, and the random bits of stochastic rounding: on the CPU and on a GPU.
#pragma once

#include <opwright/kernel.h>
#include <opwright/scratch.h>
#include <opwright/tensor.h>
#include <opwright/vec.h>

namespace opwright_ops {

using opwright::bfloat16;
using opwright::compute_t;
using opwright::List;
using opwright::View;

// 32 bits that each depend on all 32 bits of `word`: the constants of C. Wellons' "lowbias32".
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE uint32_t mix(uint32_t word) {
  word = (word ^ (word >> 16)) * 0x7feb352du;
  word = (word ^ (word >> 15)) * 0x846ca68bu;
  return word ^ (word >> 16);
}

// The tensors that are rounded stochastically; each has bits of its own.
enum Draw { kParam, kExpAvg, kExpAvgSq, kMost, kDraws };

// The random bits of one tensor in one step: 16 for each element and tensor, in words of two
// elements that follow each other.
struct RandomBits {
  uint32_t key, keys[kDraws];

  RandomBits() = default;
  OPWRIGHT_HOST_DEVICE RandomBits(uint64_t seed, uint32_t step, uint32_t tensor) {
    const uint32_t high = static_cast<uint32_t>(seed >> 32);
    key = mix(mix(mix(mix(static_cast<uint32_t>(seed)) ^ high) ^ tensor) ^ step);
    for (uint32_t draw = 0; draw < kDraws; ++draw) keys[draw] = mix(key + 1 + draw);
  }
  // What the words of a pair have in common.
  OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE uint32_t of_pair(int64_t pair) const {
    return mix(static_cast<uint32_t>(pair) ^ key) ^ static_cast<uint32_t>(pair >> 32);
  }
  OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE uint32_t word(uint32_t of_pair, Draw draw) const {
    return mix(of_pair ^ keys[draw]);
  }
};

// The upper 16 bits of a float after 16 random bits were added to the lower ones, which carry
// upwards with the probability that rounding without bias needs.
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE uint16_t round_by(float value, uint32_t bits) {
  const uint32_t word = opwright::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((value == value ? word + bits : word | 0x400000u) >> 16);
}

// The options of a call.
struct Options {
  int64_t step;
  double lr, beta1, beta2, eps, weight_decay;
  bool maximize, stochastic_rounding;
  int64_t seed, first;
};

// The factors of one step of one tensor, in the type that is computed in.
template <typename S>
struct Factors {
  S sign, take1, keep2, take2, correction2, eps, decay, size;

  Factors() = default;

  // From the rate, and 1 - beta^t for both.
  OPWRIGHT_HOST_DEVICE Factors(const Options& o, double rate, double bias1, double bias2)
      : sign(o.maximize ? S(-1) : S(1)),
        take1(S(1 - o.beta1)),
        keep2(S(o.beta2)),
        take2(S(1 - o.beta2)),
        correction2(S(1 / bias2)),
        eps(S(o.eps)),
        decay(S(1 - rate * o.weight_decay)),
        size(S(rate / bias1)) {}
};

// The tensors at one place of the lists.
template <typename T, typename S>
struct Entry {
  T* param;
  const T* grad;
  S *exp_avg, *exp_avg_sq, *most;  // the last one is null without amsgrad
  const float* step;               // null where it is an option
  int64_t count;
};

// Where the copies of tensors begin whose elements are apart.
template <typename T, typename S>
struct Copies {
  T* values;
  S* states;
};

// The lists of a call.
template <typename T, typename S>
struct Lists {
  const List<View<T, 1>>& params;
  const List<View<const T, 1>>& grads;
  const List<View<S, 1>>&exp_avgs, &exp_avg_sqs, &most;
  const List<View<const float, 0>>& steps;

  void check() const {
    const int64_t count = params.size();
    opwright::check(
        grads.size() == count && exp_avgs.size() == count && exp_avg_sqs.size() == count,
        "the lists have different lengths");
    opwright::check(
        (!most.size() || most.size() == count) && (!steps.size() || steps.size() == count),
        "max_exp_avg_sqs and steps have no tensors, or as many as params");
    for (int64_t i = 0; i < count; ++i) {
      const int64_t n = params[i].size(0);
      opwright::check(grads[i].size(0) == n && exp_avgs[i].size(0) == n &&
                          exp_avg_sqs[i].size(0) == n && (!most.size() || most[i].size(0) == n),
                      "tensors at one place of the lists have different shapes");
    }
  }
  // Room for the copies of all lists. Copies begin at a multiple of 16 bytes.
  Copies<T, S> make_room() const {
    const int64_t values = room(params) + room(grads);
    const int64_t states = room(exp_avgs) + room(exp_avg_sqs) + room(most);
    return {values ? opwright::scratch<T>(values) : nullptr,
            states ? opwright::scratch<S>(states) : nullptr};
  }
  // The tensors at one place, as adjacent elements: themselves or copies.
  Entry<T, S> gather(int64_t i, Copies<T, S>* copies) const {
    Entry<T, S> e{};
    e.param = adjacent(params[i], &copies->values), e.grad = adjacent(grads[i], &copies->values);
    e.exp_avg = adjacent(exp_avgs[i], &copies->states);
    e.exp_avg_sq = adjacent(exp_avg_sqs[i], &copies->states);
    if (most.size()) e.most = adjacent(most[i], &copies->states);
    if (steps.size()) e.step = steps[i].data();
    e.count = params[i].size(0);
    return e;
  }
  // Copies back what was computed in copies.
  void scatter(int64_t i, const Entry<T, S>& e) const {
    copy_back(e.param, params[i]);
    copy_back(e.exp_avg, exp_avgs[i]);
    copy_back(e.exp_avg_sq, exp_avg_sqs[i]);
    if (e.most) copy_back(e.most, most[i]);
  }

 private:
  static int64_t rounded(int64_t count) { return (count + 7) / 8 * 8; }
  template <typename V>
  static int64_t room(const List<V>& list) {
    int64_t count = 0;
    for (const V& view : list) count += view.is_contiguous() ? 0 : rounded(view.size(0));
    return count;
  }
  template <typename V, typename W>
  static V* adjacent(const View<V, 1>& view, W** copies) {
    if (view.is_contiguous()) return view.data();
    W* copy = *copies;
    *copies += rounded(view.size(0));
    opwright::call("aten::copy_", opwright::borrow(copy, {view.size(0)}), opwright::borrow(view),
                   false);
    return copy;
  }
  template <typename V>
  static void copy_back(V* from, const View<V, 1>& view) {
    if (from == view.data()) return;
    opwright::call("aten::copy_", opwright::borrow(view), opwright::borrow(from, {view.size(0)}),
                   false);
  }
};

}  // namespace opwright_ops

// The launcher of one operator: the stream is the last argument on a GPU.
#define OPWRIGHT_OPS_ADAMW(NAME, STATE, ...)                                                      \
  template <typename T>                                                                           \
  void NAME(List<View<T, 1>> params, List<View<const T, 1>> grads, List<View<STATE, 1>> exp_avgs, \
            List<View<STATE, 1>> exp_avg_sqs, List<View<STATE, 1>> max_exp_avg_sqs,               \
            List<View<const float, 0>> steps, View<const float, 0> rate, int64_t step, double lr, \
            double beta1, double beta2, double eps, double weight_decay, bool maximize,           \
            bool stochastic_rounding, int64_t seed,                                               \
            int64_t first __VA_OPT__(, cudaStream_t __VA_ARGS__)) {                               \
    step_all<T, STATE>({params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps}, rate,      \
                       {step, lr, beta1, beta2, eps, weight_decay, maximize, stochastic_rounding, \
                        seed, first} __VA_OPT__(, __VA_ARGS__));                                  \
  }
