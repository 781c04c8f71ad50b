// PyTorch's header of this name, whose TORCH_LIBRARY can be taken back and says what is wrong.
#pragma once
#include_next <torch/library.h>

#include <opwright_registration.h>

namespace torch::detail {

class OPWRIGHT_OWN OpwrightLibraryInit final : opwright::extension::Registration {
  using InitFn = void(Library&);
  Library::Kind kind_;
  InitFn* init_;
  const char* ns_;
  std::optional<c10::DispatchKey> key_;
  const char* file_;
  uint32_t line_;
  std::optional<Library> library_;

 public:
  OpwrightLibraryInit(Library::Kind kind, InitFn* init, const char* ns,
                      std::optional<c10::DispatchKey> key, const char* file, uint32_t line)
      : kind_(kind), init_(init), ns_(ns), key_(key), file_(file), line_(line) {
    add();
  }
  ~OpwrightLibraryInit() { remove(); }

  bool owns_namespace() const override { return kind_ == Library::DEF; }
  const char* name() const override { return ns_; }
  void make() override {
    if (library_) return;
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

}  // namespace torch::detail

// What TORCH_LIBRARY and its relatives name as torch::detail::TorchLibraryInit from here on.
#define TorchLibraryInit OpwrightLibraryInit
