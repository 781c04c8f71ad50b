// PyTorch's header of this name, whose STABLE_TORCH_LIBRARY can be taken back and says what is
// wrong.
#pragma once
#include_next <torch/csrc/stable/library.h>

#include <opwright_registration.h>

#include <optional>
#include <stdexcept>
#include <string>

namespace torch::stable::detail {

class OPWRIGHT_OWN OpwrightLibraryInit final : opwright::extension::Registration {
  using InitFn = void(StableLibrary&);
  StableLibrary::Kind kind_;
  InitFn* init_;
  const char* ns_;
  const char* key_;
  const char* file_;
  uint32_t line_;
  std::optional<StableLibrary> library_;

  // StableLibrary ignores the returned status, and goes on with an invalid handle.
  void try_namespace() const {
    TorchLibraryHandle handle = nullptr;
    if (kind_ != StableLibrary::Kind::DEF) return;
    if (aoti_torch_library_init_def(ns_, file_, line_, &handle) != AOTI_TORCH_SUCCESS)
      throw std::runtime_error(std::string("TORCH_LIBRARY: the namespace ") + ns_ +
                               " is taken by another library");
    aoti_torch_delete_library_object(handle);
  }

 public:
  OpwrightLibraryInit(StableLibrary::Kind kind, InitFn* init, const char* ns, const char* key,
                      const char* file, uint32_t line)
      : kind_(kind), init_(init), ns_(ns), key_(key), file_(file), line_(line) {
    add();
  }
  ~OpwrightLibraryInit() { remove(); }

  bool owns_namespace() const override { return kind_ == StableLibrary::Kind::DEF; }
  const char* name() const override { return ns_; }
  void make() override {
    if (library_) return;
    try_namespace();
    library_.emplace(kind_, ns_, key_, file_, line_);
    try {
      init_(*library_);
    } catch (...) {
      library_.reset();
      throw;
    }
  }
  void drop() override { library_.reset(); }
};

}  // namespace torch::stable::detail

#define StableTorchLibraryInit OpwrightLibraryInit
