// Kernel: a Triton JIT function of a Python file, called from C++.
#pragma once

#include <concepts>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "opwright/triton/arguments.h"
#include "opwright/triton/driver.h"
#include "opwright/triton/error.h"

namespace opwright::triton {

namespace detail {
struct KernelState;  // one per file, function and options, for the life of the process
struct DynamicLaunch;
struct Entry;  // a compiled and loaded kernel of one key in one context; immutable

KernelState* find_kernel(std::string_view file, std::string_view function);
KernelState* with_options(const KernelState* kernel,
                          const std::vector<std::pair<std::string, std::string>>& options);
// Returns the entry of a call, or nullptr: not seen yet in this context.
const Entry* find(const KernelState* kernel, Call& call);
// The grid of a call for an entry, whatever form the caller gave it in; `compute` is nullptr when
// nothing is to be launched.
struct GridOfCall {
  const void* given = nullptr;
  Grid (*compute)(const void* given, const KernelState* kernel, const Entry* entry,
                  const Call& call) = nullptr;
};
// Gets it: from packs, the cache, a compile. Throws Error.
const Entry* resolve(KernelState* kernel, Call& call, std::vector<std::string> texts, Stream stream,
                     GridOfCall grid);
void launch(const KernelState* kernel, const Entry* entry, Call& call, Stream stream, Grid grid);
// Throws Error unless the arguments are of the kinds that the entry was made for.
void check_bound(const KernelState* kernel, const Entry* entry, const Call& call);
int64_t meta_value(const Entry* entry, const Call& call, const KernelState* kernel,
                   std::string_view name);
Grid named_grid(const KernelState* kernel, const Entry* entry, const Call& call,
                std::string_view name);
}  // namespace detail

// The arguments of a launch by name, as a grid functor sees them: meta["BLOCK"].
class Meta {
 public:
  Meta(const detail::KernelState* kernel, const detail::Entry* entry, const detail::Call& call)
      : kernel_(kernel), entry_(entry), call_(call) {}
  // An integer argument or constexpr, defaults and autotuned ones included. Throws Error if there
  // is none.
  int64_t operator[](std::string_view name) const {
    return detail::meta_value(entry_, call_, kernel_, name);
  }

 private:
  const detail::KernelState* kernel_;
  const detail::Entry* entry_;
  const detail::Call& call_;
};

// The grid that a function or lambda of the kernel's file computes, by its name there. It is
// translated when the kernel is described; no Python runs.
struct GridFunction {
  std::string_view name;
};

// An option of the compiler: {"num_warps", 8}, {"enable_fp_fusion", false}.
struct Option {
  std::string name;
  std::string value;
  template <typename T>
  Option(std::string_view name, const T& value) : name(name), value(detail::value_text(value)) {}
  Option(std::string_view name, const char* value) : name(name), value(detail::quoted(value)) {}
};

namespace detail {
template <typename G>
inline __attribute__((always_inline)) Grid grid_of(const G& grid, const KernelState* kernel,
                                                   const Entry* entry, const Call& call) {
  if constexpr (std::integral<G>) {
    return Grid{static_cast<int64_t>(grid)};
  } else if constexpr (std::is_same_v<G, GridFunction>) {
    return named_grid(kernel, entry, call, grid.name);
  } else if constexpr (std::invocable<const G&, Meta>) {
    return grid(Meta(kernel, entry, call));
  } else {
    return grid;
  }
}
}  // namespace detail

// A kernel whose entry is fixed: a launch does not look at the classes of its arguments.
class FrozenKernel {
 public:
  FrozenKernel(const detail::KernelState* kernel, const detail::Entry* entry, const void* types)
      : kernel_(kernel), entry_(entry), types_(types) {}

  // The arguments must be of the classes that the kernel was bound with (an aligned pointer, a
  // multiple of 16, ...), which only their types are checked for; in the context that was current
  // then.
  template <typename G, typename... A>
  void operator()(Stream stream, const G& grid, const A&... arguments) const {
    detail::Capture<A...> capture(arguments...);
    if (__builtin_expect(types_ != detail::Capture<A...>::kAllNames, 0)) {
      detail::check_bound(kernel_, entry_, capture.call);
    }
    detail::launch(kernel_, entry_, capture.call, stream,
                   detail::grid_of(grid, kernel_, entry_, capture.call));
  }

  template <typename... A>
  void operator()(Stream stream, Grid grid, const A&... arguments) const {
    this->template operator()<Grid, A...>(stream, grid, arguments...);
  }

 private:
  const detail::KernelState* kernel_;
  const detail::Entry* entry_;
  const void* types_;  // of the arguments that it was bound with: an address for each list of types
};

// A Triton kernel. Copies are pointers; construct it once (`static Kernel add{"add.py",
// "add_kernel"};`).
//
// Construction touches nothing; the first call finds the kernel in the packs that are loaded, in
// the cache, or has it compiled, and every later one of the same classes costs what the driver
// does. All members may be called from any number of threads.
class Kernel {
 public:
  Kernel(std::string_view file, std::string_view function,
         std::initializer_list<Option> options = {})
      : state_(detail::find_kernel(file, function)) {
    if (options.size()) *this = with(options);
  }

  // The kernel with these options of the compiler; bind it once, not at every call.
  Kernel with(std::initializer_list<Option> options) const {
    std::vector<std::pair<std::string, std::string>> texts;
    for (const Option& option : options) texts.emplace_back(option.name, option.value);
    return Kernel(detail::with_options(state_, texts));
  }

  // Launches it. The grid is a Grid, an integer, a GridFunction, or a functor of Meta that returns
  // a Grid. Arguments are those of the Python function in its order, then named ones; those left
  // out take their defaults. Throws Error.
  template <typename G, typename... A>
  inline __attribute__((always_inline)) void operator()(Stream stream, const G& grid,
                                                        const A&... arguments) const {
    detail::Capture<A...> capture(arguments...);
    const detail::Entry* entry = detail::find(state_, capture.call);
    if (__builtin_expect(!entry, 0)) {
      entry = resolve(capture.call, stream, {&grid, compute_grid<G>}, arguments...);
    }
    detail::launch(state_, entry, capture.call, stream,
                   detail::grid_of(grid, state_, entry, capture.call));
  }

  // The grid as {x, y}.
  template <typename... A>
  inline __attribute__((always_inline)) void operator()(Stream stream, Grid grid,
                                                        const A&... arguments) const {
    this->template operator()<Grid, A...>(stream, grid, arguments...);
  }

  // Compiles and loads what such a call needs, without launching it.
  template <typename... A>
  void prepare(const A&... arguments) const {
    bind(arguments...);
  }

  // The same, and returns a handle that launches it without looking it up.
  template <typename... A>
  FrozenKernel bind(const A&... arguments) const {
    detail::Capture<A...> capture(arguments...);
    const detail::Entry* entry = detail::find(state_, capture.call);
    if (!entry) entry = resolve(capture.call, nullptr, {}, arguments...);
    return FrozenKernel(state_, entry, detail::Capture<A...>::kAllNames);
  }

 private:
  friend struct detail::DynamicLaunch;
  explicit Kernel(detail::KernelState* state) : state_(state) {}

  template <typename... A>
  __attribute__((noinline, cold)) const detail::Entry* resolve(detail::Call& call, Stream stream,
                                                               detail::GridOfCall grid,
                                                               const A&... arguments) const {
    std::vector<std::string> texts;
    (detail::append_texts(arguments, texts), ...);
    return detail::resolve(state_, call, std::move(texts), stream, grid);
  }

  template <typename G>
  static Grid compute_grid(const void* given, const detail::KernelState* kernel,
                           const detail::Entry* entry, const detail::Call& call) {
    return detail::grid_of(*static_cast<const G*>(given), kernel, entry, call);
  }

  detail::KernelState* state_;
};

}  // namespace opwright::triton
