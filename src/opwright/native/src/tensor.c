// PyTorch's tensors and operators for kernels that use them (tensor.h).
#include "call.h"

// The tensor is on the device of the call that this thread is launching; it does not own `data`,
// which is null for a tensor without elements.
i32 opwright_borrow(void* data, i64 ndim, const i64* sizes, const i64* strides, i32 dtype,
                    Handle* made) {
  const Call* call = running;
  return !call || aoti_torch_create_tensor_from_blob(data, ndim, sizes, strides, 0, dtype,
                                                     call->device_type, call->device_index, made);
}

i32 opwright_empty(i64 ndim, const i64* sizes, i32 dtype, Handle* made) {
  return !running || ndim > kMaxDims || empty_tensor(running, ndim, sizes, dtype, made);
}

static double number_of(u64 word) {
  double value;
  __builtin_memcpy(&value, &word, sizeof value);
  return value;
}

// Operators with arguments of type Scalar, which the dispatcher's ABI cannot pass. (self, left,
// right, beta, alpha, out), with doubles for the scalars.
static ScaledSum* scaled_sum(const char* name) {
  const i32 is_cuda = running && running->device_type == kCuda;
  if (!strcmp(name, "aten::addmm.out"))
    return is_cuda ? aoti_torch_cuda_addmm_out : aoti_torch_cpu_addmm_out;
  if (!strcmp(name, "aten::baddbmm.out")) {
    return is_cuda ? aoti_torch_cuda_baddbmm_out : aoti_torch_cpu_baddbmm_out;
  }
  return 0;
}

static i32 call_scaled_sum(ScaledSum* function, u64* stack) {
  const Handle self = (Handle)stack[0], left = (Handle)stack[1], right = (Handle)stack[2];
  const Handle out = (Handle)stack[5];
  const i32 failed = function(out, self, left, right, number_of(stack[3]), number_of(stack[4]));
  aoti_torch_delete_tensor_object(self);
  aoti_torch_delete_tensor_object(left);
  aoti_torch_delete_tensor_object(right);
  if (failed) aoti_torch_delete_tensor_object(out);
  stack[0] = (u64)out;
  return failed;
}

// `name` with its overload, as in "aten::mm.out". The words of the stack are consumed and replaced
// by the results. Returns why it failed, until this thread's next failure.
const char* opwright_call(const char* name, u64* stack) {
  static __thread char text[2048];
  char base[256];
  ScaledSum* const special = scaled_sum(name);
  i32 failed;
  if (special) {
    failed = call_scaled_sum(special, stack);
  } else {
    u64 length = 0, dot = 0;
    for (; name[length] && length + 1 < sizeof base; ++length) {
      if (!dot && name[length] == '.' && length) dot = length;
      base[length] = name[length];
    }
    base[length] = 0;
    if (dot) base[dot] = 0;
    failed = torch_call_dispatcher(base, dot ? base + dot + 1 : "", stack, TARGET_VERSION);
  }
  if (!failed) return 0;
  const char* why = torch_exception_get_what_without_backtrace
                        ? torch_exception_get_what_without_backtrace()
                        : "PyTorch refused it, and said why on stderr";
  snprintf(text, sizeof text, "%s: %s", name, why);
  return text;
}
