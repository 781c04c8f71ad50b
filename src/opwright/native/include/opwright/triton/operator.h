// What the launch functions of a triton.py become: C++ that calls Triton kernels for an operator.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

#include "opwright/triton.h"
#include "opwright/triton/integers.h"
#include "opwright/view.h"

namespace opwright::triton {

template <typename T, int R>
struct as_pointer<View<T, R>> {
  static Pointer get(const View<T, R>& view) {
    // The glue has checked devices; an optional argument that was not given has no data. Views of
    // empty tensors point to the host's memory, and PyTorch's to none.
    if (!view.data()) return {};
    return {view.numel() ? view.data() : nullptr, dtype_of<std::remove_const_t<T>>::value};
  }
};

// An expression of a launch function; called, it throws an error that names it.
struct Place {
  const char* expression;
  const char* line;  // "triton.py:7"
  [[noreturn, gnu::cold, gnu::noinline]] void operator()(const char* why) const {
    throw Error(Cause::kArgument, std::string("`") + expression + "` (" + line + "): " + why);
  }
};

// Prepares an operator's library: who compiles, where the cache is, and the pack triton.opk beside
// its triton.py if there is one, as a package brings it. Returns null, or what is wrong, until the
// thread's next call.
inline const char* set_up(Compiler compiler, const char* cache_dir,
                          std::string_view file) noexcept {
  static thread_local std::string text;
  try {
    Settings settings;
    settings.cache_dir = cache_dir;
    configure(settings);
    if (compiler) set_compiler(compiler);
    const std::string pack = std::string(file.substr(0, file.rfind('.'))) + ".opk";
    if (access(pack.c_str(), R_OK) == 0) load_pack(pack);
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}

// A kernel under options that are computed at every launch: one variant for each combination of
// values.
template <size_t N>
class Variants {
 public:
  Variants(const Kernel& kernel, const std::array<const char*, N>& names)
      : kernel_(kernel), names_(names) {}

  const Kernel& with(const std::array<int64_t, N>& values) {
    for (const Variant* known = first_.load(std::memory_order_acquire); known;
         known = known->next) {
      if (known->values == values) return known->kernel;
    }
    auto* variant = new Variant{values, kernel_, nullptr};  // never freed: a launch may be using it
    for (size_t i = 0; i < N; ++i) variant->kernel = variant->kernel.with({{names_[i], values[i]}});
    const Variant* first = first_.load(std::memory_order_acquire);
    do {
      variant->next = first;
    } while (!first_.compare_exchange_weak(first, variant, std::memory_order_release));
    return variant->kernel;
  }

 private:
  struct Variant {
    std::array<int64_t, N> values;
    Kernel kernel;
    const Variant* next;
  };
  Kernel kernel_;
  std::array<const char*, N> names_;
  std::atomic<const Variant*> first_{nullptr};
};

}  // namespace opwright::triton
