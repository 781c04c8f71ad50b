// Tensors and ATen operators, for kernels that leave a part of their work to PyTorch:
//
//   opwright::call("aten::mm.out", borrow(a), borrow(b), borrow(out));
//
// No header of PyTorch is behind it: functions of its stable ABI, declared by hand.
#pragma once

#include <initializer_list>
#include <tuple>

#include "opwright/entry.h"
#include "opwright/scratch.h"
#include "opwright/view.h"

extern "C" {
// PyTorch's. Zero on success.
int32_t aoti_torch_new_tensor_handle(void*, void**);
int32_t aoti_torch_delete_tensor_object(void*);
int32_t aoti_torch_get_dim(void*, int64_t*);
int32_t aoti_torch_get_sizes(void*, int64_t**);
int32_t aoti_torch_get_strides(void*, int64_t**);
int32_t aoti_torch_get_dtype(void*, int32_t*);
int32_t aoti_torch__reinterpret_tensor(void*, int64_t, const int64_t*, const int64_t*, int64_t,
                                       void**);
int32_t torch_get_mutable_data_ptr(void*, void**);
int32_t torch_new_list_reserve_size(uint64_t, void**);
int32_t torch_list_push_back(void*, uint64_t);
// Defined by the generated glue.
int32_t opwright_borrow(void*, int64_t, const int64_t*, const int64_t*, int32_t, void**);
int32_t opwright_empty(int64_t, const int64_t*, int32_t, void**);
const char* opwright_call(const char*, uint64_t*);
}

namespace opwright {

// A list of numbers: sizes, strides, an argument of type int[] or SymInt[].
struct Ints {
  static constexpr int kMost = 16;
  int size_;
  int64_t data_[kMost];
  Ints(std::initializer_list<int64_t> list)
      : Ints(list.begin(), static_cast<int64_t>(list.size())) {}
  Ints(const int64_t* data, int64_t size) : size_(static_cast<int>(size)) {
    check(size <= kMost, "a list has more than 16 numbers");
    for (int i = 0; i < size_; ++i) data_[i] = data[i];
  }
};

// A reference to a tensor of PyTorch; copies refer to the same one.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(void* handle) : handle_(handle) {}  // takes it over
  Tensor(const Tensor& other) : handle_(other.share()) {}
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor& operator=(Tensor other) noexcept {
    void* const mine = handle_;
    handle_ = other.handle_;
    other.handle_ = mine;
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  // Contiguous, not initialised, on the device of the running call.
  template <typename T>
  static Tensor empty(const Ints& sizes) {
    void* made;
    check(!opwright_empty(sizes.size_, sizes.data_, detail::kScalarType<T>, &made),
          "a tensor cannot be made: memory is out, or this thread runs no operator");
    return Tensor(made);
  }

  bool defined() const { return handle_ != nullptr; }
  int dim() const { return static_cast<int>(read(aoti_torch_get_dim)); }
  int64_t size(int d) const { return read(aoti_torch_get_sizes)[checked(d)]; }
  int64_t stride(int d) const { return read(aoti_torch_get_strides)[checked(d)]; }
  int64_t numel() const {
    const int64_t* sizes = read(aoti_torch_get_sizes);
    int64_t count = 1;
    for (int d = 0, rank = dim(); d < rank; ++d) count *= sizes[d];
    return count;
  }

  template <typename T>
  T* data() const {
    check(read(aoti_torch_get_dtype) == detail::kScalarType<T>,
          "a tensor's data are read as another dtype");
    return static_cast<T*>(read(torch_get_mutable_data_ptr));
  }

  // Other sizes and strides over the same memory, `offset` elements further on: as_strided, with an
  // offset from the first element of this tensor.
  Tensor view(const Ints& sizes, const Ints& strides, int64_t offset = 0) const {
    check(defined() && sizes.size_ == strides.size_, "a view needs a stride for each size");
    void* made;
    check(!aoti_torch__reinterpret_tensor(handle_, sizes.size_, sizes.data_, strides.data_, offset,
                                          &made),
          "a view of a tensor cannot be made");
    return Tensor(made);
  }

  Tensor transpose(int a, int b) const {
    const int rank = dim();
    Ints sizes(read(aoti_torch_get_sizes), rank), strides(read(aoti_torch_get_strides), rank);
    sizes.data_[checked(a)] = size(b), sizes.data_[checked(b)] = size(a);
    strides.data_[a] = stride(b), strides.data_[b] = stride(a);
    return view(sizes, strides);
  }

  Tensor t() const { return transpose(0, 1); }

  // The handle of PyTorch's C functions: lent, shared as a new one, given away.
  void* handle() const { return handle_; }
  void* share() const {
    void* shared = nullptr;
    check(!handle_ || !aoti_torch_new_tensor_handle(handle_, &shared), "a tensor cannot be shared");
    return shared;
  }
  void* release() {
    void* const handle = handle_;
    handle_ = nullptr;
    return handle;
  }

 private:
  int checked(int d) const {
    check(0 <= d && d < dim(), "a tensor has no such dimension");
    return d;
  }
  template <typename R>
  R read(int32_t (*get)(void*, R*)) const {
    R result{};
    check(handle_ && !get(handle_, &result), "a tensor cannot be read: it is undefined");
    return result;
  }

  void* handle_ = nullptr;
};

// A tensor over memory of a running kernel: its arguments, outputs, scratch space. Nothing is
// copied or owned, so it must not outlive them. It is on the device of the running call.
template <typename T>
Tensor borrow(T* data, const Ints& sizes, const Ints& strides) {
  check(sizes.size_ == strides.size_, "borrow: a stride is needed for each size");
  int64_t count = 1;
  for (int d = 0; d < sizes.size_; ++d) count *= sizes.data_[d];
  void* made;
  check(!opwright_borrow(count ? data : nullptr, sizes.size_, sizes.data_, strides.data_,
                         detail::kScalarType<T>, &made),
        "memory cannot be borrowed as a tensor: this thread runs no operator");
  return Tensor(made);
}

template <typename T>
Tensor borrow(const T* data, const Ints& sizes, const Ints& strides) {  // to be read
  return borrow(const_cast<T*>(data), sizes, strides);
}

template <typename T>
Tensor borrow(T* data, const Ints& sizes) {  // contiguous
  Ints strides = sizes;
  for (int64_t d = sizes.size_ - 1, step = 1; d >= 0; --d) {
    strides.data_[d] = step;
    step *= sizes.data_[d];
  }
  return borrow(data, sizes, strides);
}

// Undefined for an optional argument that was not given.
template <typename T, int R>
Tensor borrow(const View<T, R>& view) {
  if (!view.defined()) return {};
  if constexpr (R == 0) {
    return borrow(view.data_, Ints(nullptr, 0), Ints(nullptr, 0));
  } else {
    return borrow(view.data_, Ints(view.sizes_, R), Ints(view.strides_, R));
  }
}

// An argument of an optional type, such as Tensor? or int?; an undefined tensor is none.
template <typename T>
struct Optional {
  const T* value;
};
template <typename T>
Optional<T> optional(const T& value) {
  return {&value};
}
inline constexpr Optional<int64_t> none{nullptr};

namespace detail {

// Arguments as words of the dispatcher's stack, which owns what they refer to.
inline uint64_t word(bool value) { return value; }
inline uint64_t word(int value) { return static_cast<uint64_t>(static_cast<int64_t>(value)); }
inline uint64_t word(int64_t value) { return static_cast<uint64_t>(value); }
inline uint64_t word(double value) { return __builtin_bit_cast(uint64_t, value); }
inline uint64_t word(const Tensor& tensor) { return reinterpret_cast<uint64_t>(tensor.share()); }
inline uint64_t word(const Ints& ints) {
  void* list;
  check(!torch_new_list_reserve_size(static_cast<uint64_t>(ints.size_), &list), "out of memory");
  for (int i = 0; i < ints.size_; ++i) torch_list_push_back(list, word(ints.data_[i]));
  return reinterpret_cast<uint64_t>(list);
}
inline uint64_t word(std::initializer_list<Tensor> tensors) {
  void* list;
  check(!torch_new_list_reserve_size(tensors.size(), &list), "out of memory");
  for (const Tensor& tensor : tensors) torch_list_push_back(list, word(tensor));
  return reinterpret_cast<uint64_t>(list);
}
template <typename T>
uint64_t word(const Optional<T>& optional) {
  if constexpr (kSame<T, Tensor>) {
    if (optional.value && !optional.value->defined()) return 0;
  }
  return optional.value ? reinterpret_cast<uint64_t>(new uint64_t(word(*optional.value))) : 0;
}
template <typename T>
uint64_t word(const T&) = delete;  // a type that PyTorch's stable ABI cannot pass

template <typename T>
bool is_given(const T&) {
  return true;
}
inline bool is_given(const Tensor& tensor) { return tensor.defined(); }

template <typename R>
struct Results {
  static constexpr int kCount = 1;
  static R take(const uint64_t* words) {
    if constexpr (kSame<R, Tensor>) {
      return Tensor(reinterpret_cast<void*>(*words));
    } else if constexpr (kSame<R, bool>) {
      return *words & 0xff;
    } else {
      static_assert(kSame<R, double> || kSame<R, int64_t>,
                    "a result is a Tensor, a number, or a std::tuple of them");
      return __builtin_bit_cast(R, *words);
    }
  }
};
template <>
struct Results<void> {
  static constexpr int kCount = 0;
  static void take(const uint64_t*) {}
};
template <typename... Rs>
struct Results<std::tuple<Rs...>> {
  static constexpr int kCount = sizeof...(Rs);
  static std::tuple<Rs...> take(const uint64_t* words) {
    return std::tuple<Rs...>{Results<Rs>::take(words++)...};
  }
};

}  // namespace detail

// Calls an operator of PyTorch by its name and overload, such as "aten::mm" or "aten::mm.out". All
// arguments of its schema are given, defaults too, in order and of these types: Tensor, bool,
// int64_t, double, Ints, std::initializer_list<Tensor>{a, b}, optional(value) and none; an optional
// list of numbers is optional(Ints{0}). Result is what the schema returns: Tensor, int64_t, double,
// bool, void, or a std::tuple. Of the operators with an argument of type Scalar only
// aten::addmm.out and aten::baddbmm.out can be called, which take a double for it. Raises Error
// with the operator's name and PyTorch's words.
//
// Above at::mm_out, which takes 0.44 us for matrices of 8 x 8, call("aten::mm.out") takes 0.27 us;
// above at::addmm_out, 0.05 us; borrow takes 0.12 us (2-core Xeon, Sapphire Rapids class).
template <typename Result = Tensor, typename... Args>
Result call(const char* name, const Args&... args) {
  constexpr int kArguments = sizeof...(Args), kResults = detail::Results<Result>::kCount;
  constexpr int kWords = 1 + (kArguments > kResults ? kArguments : kResults);
  check((detail::is_given(args) && ...),
        "call: a tensor among the arguments is undefined; optional(tensor) may be");
  uint64_t words[kWords] = {detail::word(args)...};
  if (const char* failure = opwright_call(name, words)) throw Error(failure);
  return detail::Results<Result>::take(words);
}

// The rows of a tensor with their elements adjacent; where they are apart, those of a copy.
template <typename T>
View<const T, 2> with_adjacent_columns(const View<const T, 2>& view) {
  const int64_t rows = view.size(0), n = view.size(1);
  if (n == 1 || view.stride(1) == 1) return view;
  T* copy = scratch<T>(rows * n);
  call("aten::copy_", borrow(copy, {rows, n}), borrow(view), false);
  return {copy, {rows, n}, {n, 1}};
}

// Calls body(from, to) for a matrix that it changes: the same rows twice, to be read and to be
// written. Where their elements are apart, they are those of a copy, which is written back.
template <typename T, typename Body>
void in_adjacent_columns(const View<T, 2>& view, const Body& body) {
  const View<const T, 2> rows = with_adjacent_columns(View<const T, 2>{
      view.data(), {view.size(0), view.size(1)}, {view.stride(0), view.stride(1)}});
  body(rows,
       View<T, 2>{const_cast<T*>(rows.data()), {rows.size(0), rows.size(1)}, {rows.stride(0), 1}});
  if (rows.data() == view.data()) return;
  call("aten::copy_", borrow(view), borrow(rows), false);
}

}  // namespace opwright
