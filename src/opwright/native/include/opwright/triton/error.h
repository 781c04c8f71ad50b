// What a failed launch throws.
#pragma once

#include <stdexcept>
#include <string>

namespace opwright::triton {

enum class Cause {
  kKernelFile,   // the Python file or the function in it
  kArgument,     // number, name, type or device of an argument
  kCompile,      // Triton refused the kernel
  kWorker,       // the compile worker cannot be started, died, or lied
  kPack,         // a pack that cannot be read, or lacks the kernel while frozen
  kCapturing,    // a compile or a load would be needed during graph capture
  kSetting,      // OPWRIGHT_TRITON
  kDriver,       // no driver, or an error of the driver
  kInterrupted,  // Ctrl-C during a compile in this process
};

// The text names the kernel, its file and line, the argument, what was expected and given, and what
// to do.
class Error : public std::runtime_error {
 public:
  Error(Cause cause, const std::string& text) : std::runtime_error(text), cause_(cause) {}
  Cause cause() const { return cause_; }

 private:
  Cause cause_;
};

}  // namespace opwright::triton
