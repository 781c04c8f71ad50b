// What the kernels of both backends do with the views that they are given.
#pragma once

#include <opwright/kernel.h>
#include <opwright/scratch.h>
#include <opwright/tensor.h>

namespace opwright_ops {

// The rows of a tensor; where its columns are apart, those of a copy.
template <typename T>
opwright::View<const T, 2> with_adjacent_columns(const opwright::View<const T, 2>& view) {
  const int64_t rows = view.size(0), n = view.size(1);
  if (n == 1 || view.stride(1) == 1) return view;
  T* copy = opwright::scratch<T>(rows * n);
  opwright::call("aten::copy_", opwright::borrow(copy, {rows, n}), opwright::borrow(view), false);
  return {copy, {rows, n}, {n, 1}};
}

}  // namespace opwright_ops
