// A few steps with weights that stay packed and a state that stays in place.
#include "call.h"

using namespace opwright_ops;

namespace {

template <typename W>
Prepared prepared(View<const W, 3> weight, const float* scale) {
  opwright::check(weight.is_contiguous() && weight.size(2) == kPreparedColumns,
                  "packed weights must be contiguous");
  return {weight.data(), kScalarType<W>, scale, weight.size(1)};
}

}  // namespace

template <typename W>
void lstm_step(View<const float, 3> input, View<float, 2> h, View<float, 2> c,
               View<const W, 3> weight_ih, View<const W, 3> weight_hh, View<const float, 3> scale,
               View<const float, 1> bias, View<const W, 3> weight_hr, View<const float, 2> scale_hr,
               View<const float, 2> peephole, View<const float, 1> norm_ih,
               View<const float, 1> norm_hh, View<const float, 2> norm_c, Activation activation,
               double slope, bool coupled, double clip, double zoneout_h, double zoneout_c,
               View<float, 3> output) {
  Arguments<float> a{};
  a.input = input;
  a.h_0 = {h.data(), {h.size(0), h.size(1)}, {h.stride(0), h.stride(1)}};
  a.c_0 = {c.data(), {c.size(0), c.size(1)}, {c.stride(0), c.stride(1)}};
  a.weight_hh = {nullptr, {4 * c.size(1), h.size(1)}, {h.size(1), 1}};
  a.bias_ih = bias, a.peephole = peephole, a.norm_ih = norm_ih, a.norm_hh = norm_hh,
  a.norm_c = norm_c;
  if (weight_hr.defined()) a.weight_hr.data_ = a.h_0.data();  // that there is one; it is not read
  a.options = options_of<float>(activation, slope, coupled, clip, zoneout_h, zoneout_c, false);
  a.check();
  opwright::check(!scale.defined() || scale.is_contiguous(), "`scale` must be contiguous");
  opwright::check(!scale_hr.defined() || scale_hr.is_contiguous(), "`scale_hr` must be contiguous");

  const Schedule schedule(input.size(0), input.size(1), false, {});
  Parameters<float, float> layer;
  read_parameters<float>(layer, a);
  const int64_t H = layer.H, blocks = weight_hh.size(0);
  opwright::check(blocks == (H + kPreparedUnits - 1) / kPreparedUnits &&
                      weight_ih.size(1) == input.size(2) && weight_hh.size(1) == layer.R,
                  "packed weights must be of a layer with the sizes of `input`, `h` and `c`");
  opwright::check(!weight_hr.defined() ||
                      weight_hr.size(0) == (layer.R + kPreparedColumns - 1) / kPreparedColumns,
                  "`weight_hr` must be of a layer with the size of `h`");
  Forward<float, float> forward{schedule, layer};
  forward.output = Sequence<float>(output);
  const float* scales = scale.defined() ? scale.data() : nullptr;
  forward.ih_prepared = prepared(weight_ih, scales);
  forward.hh_prepared = prepared(weight_hh, scales ? scales + blocks * kPreparedColumns : nullptr);
  if (weight_hr.defined())
    forward.hr_prepared = prepared(weight_hr, scale_hr.defined() ? scale_hr.data() : nullptr);
  Buffer<float> x_memory, from_input;
  const Matrix<float> x = rows_of<float>(schedule, input, x_memory);
  forward.from_input = nullptr, forward.x = x.data, forward.x_stride = x.row_stride;
  constexpr int N = opwright::kLanes<float>;
  if (norm_ih.defined()) {
    // Normalisation needs whole rows.
    from_input.allocate(x.rows * 4 * H);
    parallel_for(layer.Hp / N, [&](int64_t begin, int64_t end) {
      Buffer<Sums<float>> sums;
      sums.allocate_zeros(x.rows * (end - begin));
      for (int64_t panel = begin; panel < end; ++panel) {
        Sums<float>* found = sums.data() + (panel - begin) * x.rows;
        multiply_prepared_gates<float>(x.data, x.row_stride, x.rows, forward.ih_prepared, panel * N,
                                       found);
        const int count = static_cast<int>(H - panel * N < N ? H - panel * N : N);
        for (int64_t row = 0; row < x.rows; ++row) {
          for (int j = 0; j < 4; ++j)
            store_first(&from_input[(row * 4 + j) * H + panel * N], found[row][j], count);
        }
      }
    });
    normalise(from_input.data(), schedule, a);
    forward.from_input = from_input.data();
  }
  const int members = team_size(a, layer.Hp / N);
  forward.allocate();
  start(forward, a.h_0, a.c_0, a.h_mask);
  opwright::team(members, [&](const Member& member) {
    if (a.is_plain())
      forward.template run<true>(member);
    else
      forward.template run<false>(member);
  });
  finish(forward, a.h_0, output, h, c);
}
OPWRIGHT_KERNEL(lstm_step, float, opwright::bfloat16, int8_t)
