// What may be subtracted from all elements of a row before they are added up.
#pragma once

#include <opwright/types.h>

namespace opwright_ops {

// The median of three numbers; 0 if it is so large that a row of it has no sum, or NaN.
template <typename S>
OPWRIGHT_HOST_DEVICE inline S base_of(S a, S b, S c) {
  const S low = a < b ? a : b, high = a < b ? b : a;
  const S median = c < low ? low : c > high ? high : c;
  return median < S(1e30f) && median > S(-1e30f) ? median : S(0);
}

}  // namespace opwright_ops
