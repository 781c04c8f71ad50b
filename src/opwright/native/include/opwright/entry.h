// How a kernel is exported (OPWRIGHT_KERNEL) and how it reports that it cannot go on (check,
// check_index).
#pragma once

#include <exception>
#if defined(__CUDACC__)
#include <cstdio>
#endif

#include "opwright/types.h"

namespace opwright {

namespace detail {

// Copies what fits of a text. A null pointer is an empty one.
template <unsigned kSize>
__attribute__((noinline, cold)) void copy_text(char (&to)[kSize], const char* from) noexcept {
  unsigned length = 0;
  for (; from && from[length] && length + 1 < kSize; ++length) to[length] = from[length];
  to[length] = '\0';
}

}  // namespace detail

// Thrown by check; its text reaches the caller as a Python exception that names the operator.
struct Error : std::exception {
  char text[512];
  explicit Error(const char* message) { detail::copy_text(text, message); }
  const char* what() const noexcept override { return text; }
};

namespace detail {

// Out of line, so that a check costs its kernel little.
[[noreturn]] __attribute__((noinline, cold)) inline void raise(const char* message) {
  throw Error(message);
}

}  // namespace detail

// Raises an error with this text unless the claim holds.
inline void check(bool claim, const char* message) {
  if (!claim) detail::raise(message);
}

// The same with a std::string.
template <typename Text>
auto check(bool claim, const Text& message) -> decltype(check(claim, message.c_str())) {
  check(claim, message.c_str());
}

// Returns the place of an index in a dimension, a negative one counted from the end. Raises
// Python's IndexError for one that lies outside, as PyTorch does.
inline int64_t check_index(int64_t index, int64_t size) {
  if (-size <= index && index < size) return index < 0 ? index + size : index;
  char text[128];
  __builtin_snprintf(text, sizeof text,
                     "IndexError: index %lld is out of bounds for a dimension of size %lld",
                     static_cast<long long>(index), static_cast<long long>(size));
  throw Error(text);
}

namespace detail {

template <typename A, typename B>
inline constexpr bool kSame = false;
template <typename A>
inline constexpr bool kSame<A, A> = true;

// Runs `call` and turns an exception into its text, which lives until the thread's next error.
template <typename Call>
const char* guarded(const Call& call) noexcept {
  static thread_local char text[512];
  try {
    call();
    return nullptr;
  } catch (const std::exception& error) {
    copy_text(text, error.what());
    return text[0] ? text : "the kernel threw an exception without a text";
  } catch (...) {
    return "the kernel threw something that is not a std::exception";
  }
}

// A CUDA source is compiled twice, side by side: OPWRIGHT_ONLY_16BIT is 0 for its 32- and 64-bit
// types and 1 for its 16-bit types. Undefined: all types at once.
#if !defined(OPWRIGHT_ONLY_16BIT)
#define OPWRIGHT_ENTRY_SYMBOL(NAME) NAME
template <typename T>
inline constexpr bool kIsCompiled = true;
#elif OPWRIGHT_ONLY_16BIT
#define OPWRIGHT_ENTRY_SYMBOL(NAME) NAME##_16bit
template <typename T>
inline constexpr bool kIsCompiled = sizeof(T) == 2;
#else
#define OPWRIGHT_ENTRY_SYMBOL(NAME) NAME
template <typename T>
inline constexpr bool kIsCompiled = sizeof(T) != 2;
#endif

// Calls call.template operator()<T>() if `dtype` is the scalar type of T; returns whether it did.
template <typename T, typename Call>
bool call_if([[maybe_unused]] int dtype, [[maybe_unused]] const Call& call) {
  if constexpr (kIsCompiled<T>) {
    if (dtype == kScalarType<T>) return call.template operator()<T>(), true;
  }
  return false;
}

// Calls call.template operator()<T>() for the one T of Types whose scalar type is `dtype`.
template <typename... Types, typename Call>
const char* dispatch(int dtype, const Call& call) noexcept {
  bool found = false;
  const char* failure = guarded([&] { found = (call_if<Types>(dtype, call) || ...); });
  if (failure) return failure;
  return found ? nullptr : "unsupported dtype";
}

// Scalar types as a mask of PyTorch's numbers: those named, and those compiled here.
template <typename... Types>
inline constexpr unsigned long long kTypeMask = ((1ull << kScalarType<Types>) | ... | 0ull);
template <typename... Types>
inline constexpr unsigned long long kCompiledMask =
    ((kIsCompiled<Types> ? 1ull << kScalarType<Types> : 0ull) | ... | 0ull);

#if defined(__CUDACC__)
// Raises what a launch left behind. The text starts with the error's number, which the caller turns
// into an error of its own with the remedy.
inline void check_launch() {
  const cudaError_t code = cudaGetLastError();
  if (code == cudaSuccess) return;
  char text[256];
  std::snprintf(text, sizeof text, "CUDA error %d, %s: %s", static_cast<int>(code),
                cudaGetErrorName(code), cudaGetErrorString(code));
  throw Error(text);
}
#else
inline void check_launch() {}  // a Triton launch raises what fails itself
#endif

}  // namespace detail
}  // namespace opwright

// Exports the function template NAME, instantiated for the scalar types that follow:
//   OPWRIGHT_KERNEL(bias_gelu, float, double, opwright::half, opwright::bfloat16)
// The macro OPWRIGHT_ENTRY_<NAME> comes from the operator's contract, in a generated header that is
// included before the source; it checks the signature and unpacks the arguments.
#define OPWRIGHT_KERNEL(NAME, ...) OPWRIGHT_ENTRY_##NAME(__VA_ARGS__)
