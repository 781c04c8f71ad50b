// The arguments of a kernel: pointers with sizes and strides (in elements), nothing owned.
#pragma once

#include <cstdint>

#include "opwright/types.h"

namespace opwright {

// A tensor of rank R. An input is View<const T, R>, an output View<T, R>. A variadic axis of the
// contract (`*batch`) is one dimension here. The generated glue fills the struct field by field, so
// its layout is fixed: data, sizes, strides.
template <typename T, int R>
struct View {
  T* data_;
  int64_t sizes_[R];
  int64_t strides_[R];

  template <typename... Index>
  OPWRIGHT_HOST_DEVICE T& operator()(Index... index) const {
    static_assert(sizeof...(Index) == R, "a View takes one index per dimension");
    const int64_t at[] = {static_cast<int64_t>(index)...};
    int64_t offset = 0;
    for (int d = 0; d < R; ++d) offset += at[d] * strides_[d];
    return data_[offset];
  }

  OPWRIGHT_HOST_DEVICE T& operator[](int64_t index) const {
    static_assert(R == 1, "a View of several dimensions takes its indices in parentheses: x(i, j)");
    return data_[index * strides_[0]];
  }

  OPWRIGHT_HOST_DEVICE T* data() const { return data_; }
  OPWRIGHT_HOST_DEVICE int64_t size(int dim) const { return sizes_[dim]; }
  OPWRIGHT_HOST_DEVICE int64_t stride(int dim) const { return strides_[dim]; }
  // False for an optional argument that was not given.
  OPWRIGHT_HOST_DEVICE bool defined() const { return data_ != nullptr; }

  OPWRIGHT_HOST_DEVICE int64_t numel() const {
    int64_t count = 1;
    for (int d = 0; d < R; ++d) count *= sizes_[d];
    return count;
  }

  // Row-major without gaps.
  OPWRIGHT_HOST_DEVICE bool is_contiguous() const {
    int64_t expected = 1;
    for (int d = R - 1; d >= 0; --d) {
      if (sizes_[d] != 1 && strides_[d] != expected) return false;
      expected *= sizes_[d];
    }
    return true;
  }
};

template <typename T>
struct View<T, 0> {
  T* data_;
  OPWRIGHT_HOST_DEVICE T& operator()() const { return *data_; }
  OPWRIGHT_HOST_DEVICE T* data() const { return data_; }
  OPWRIGHT_HOST_DEVICE bool defined() const { return data_ != nullptr; }
  OPWRIGHT_HOST_DEVICE int64_t numel() const { return 1; }
  OPWRIGHT_HOST_DEVICE bool is_contiguous() const { return true; }
};

// A list of tensors: List<View<const T, R>>.
template <typename V>
struct List {
  const V* data_;
  int64_t size_;
  OPWRIGHT_HOST_DEVICE int64_t size() const { return size_; }
  OPWRIGHT_HOST_DEVICE const V& operator[](int64_t i) const { return data_[i]; }
  OPWRIGHT_HOST_DEVICE const V* begin() const { return data_; }
  OPWRIGHT_HOST_DEVICE const V* end() const { return data_ + size_; }
};

}  // namespace opwright
