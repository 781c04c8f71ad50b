// The adapter of at::Tensor, and a launch with it above the stub driver.
#include <chrono>
#include <cstring>

#include <ATen/ops/_lazy_clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <opwright/triton/aten.h>

#include "check.h"

namespace ot = opwright::triton;
using ot::DType;

static ot::Pointer pointer_to(const at::Tensor& tensor) {
  return ot::as_pointer<at::Tensor>::get(tensor);
}

static void check_dtypes() {
  const struct {
    at::ScalarType type;
    DType dtype;
  } known[] = {{at::kHalf, DType::fp16},
               {at::kBFloat16, DType::bf16},
               {at::kFloat, DType::fp32},
               {at::kDouble, DType::fp64},
               {at::kChar, DType::i8},
               {at::kShort, DType::i16},
               {at::kInt, DType::i32},
               {at::kLong, DType::i64},
               {at::kByte, DType::u8},
               {at::kUInt16, DType::u16},
               {at::kUInt32, DType::u32},
               {at::kUInt64, DType::u64},
               {at::kBool, DType::u1},
               {at::kFloat8_e4m3fn, DType::fp8e4nv},
               {at::kFloat8_e5m2, DType::fp8e5},
               {at::kFloat8_e4m3fnuz, DType::fp8e4b8},
               {at::kFloat8_e5m2fnuz, DType::fp8e5b16}};
  int count = 0;
  for (const auto& row : known) {
    const at::Tensor tensor = at::empty({4}, row.type);
    EXPECT(is_same(pointer_to(tensor), {tensor.data_ptr(), row.dtype, ot::kHostDevice}));
    EXPECT(ot::to_dtype(row.type) == row.dtype);
  }
  for (int type = 0; type < static_cast<int>(at::ScalarType::NumOptions); ++type) {
    count += ot::detail::kTorchDTypes.of[type] != DType::none;
  }
  EXPECT(count == std::size(known));
  EXPECT(refuses([] { pointer_to(at::empty({4}, at::kComplexFloat)); }, "given     ComplexFloat"));
  EXPECT(refuses([] { pointer_to(at::empty({4}, at::kFloat8_e8m0fnu)); },
                 "tensor.view(torch::kUInt8)"));
  static_assert(ot::dtype_of<at::Half>::value == DType::fp16 &&
                ot::dtype_of<at::BFloat16>::value == DType::bf16);
}

static void check_tensors() {
  EXPECT(is_same(pointer_to(at::Tensor()), {}));
  EXPECT(is_same(ot::read_only(at::Tensor()), {}));
  const at::Tensor tensor = at::zeros({8});
  EXPECT(pointer_to(tensor.slice(0, 1)).address == tensor.data_ptr<float>() + 1);
  EXPECT(tensor.use_count() == 1);
  EXPECT(ot::current_stream(tensor) == nullptr);
  // A lazy copy is shared until the kernel may write to it.
  const at::Tensor copy = at::_lazy_clone(tensor);
  EXPECT(ot::read_only(copy).address == tensor.const_data_ptr());
  EXPECT(pointer_to(copy).address != tensor.const_data_ptr());
}

static void check_launches() {
  const ot::Kernel add(KERNEL_FILE, "add_kernel");
  const at::Tensor x = at::zeros({64}), y = at::zeros({64}), out = at::empty({64});
  const std::optional<at::Tensor> some = y;
  add(ot::current_stream(x), 1, x, some, out, 64, ot::cx(64));
  const at::Tensor half = x.to(at::kHalf);
  add(nullptr, 2, half, half, half.data_ptr<at::Half>(), 64, ot::cx(64));
  const ot::Kernel constant(KERNEL_FILE, "constant_kernel");
  const std::optional<at::Tensor> none;
  constant(nullptr, 3, x, none, ot::cx("none"), ot::cx(ot::to_dtype(x.scalar_type())),
           ot::cx(nullptr), ot::cx(std::tuple(16)));
  constant(nullptr, 4, x, at::Tensor(), ot::cx("none"), ot::cx(ot::to_dtype(x.scalar_type())),
           ot::cx(nullptr), ot::cx(std::tuple(16)));
}

// Prints what three tensors cost more than three addresses, in ns.
static void measure() {
  const at::Tensor x = at::zeros({64}), y = at::zeros({64}), out = at::empty({64});
  const auto time = [](const auto& body) {
    constexpr int kCalls = 1'000'000;
    double least = 1e9;
    for (int sample = 0; sample < 20; ++sample) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < kCalls; ++i) body();
      const std::chrono::duration<double, std::nano> taken =
          std::chrono::steady_clock::now() - start;
      least = std::min(least, taken.count() / kCalls);
    }
    return least;
  };
  const auto keep = [](const ot::Pointer& pointer) {
    asm volatile("" : : "m"(pointer) : "memory");
  };
  const double tensors =
      time([&] { keep(pointer_to(x)), keep(pointer_to(y)), keep(pointer_to(out)); });
  const double shared =
      time([&] { keep(ot::read_only(x)), keep(ot::read_only(y)), keep(ot::read_only(out)); });
  const auto address = [](const at::Tensor& t) {
    return ot::Pointer{t.unsafeGetTensorImpl(), DType::fp32};
  };
  const double addresses = time([&] { keep(address(x)), keep(address(y)), keep(address(out)); });
  std::printf("three tensors: %.1f ns, read_only %.1f ns, three addresses %.1f ns\n", tensors,
              shared, addresses);
}

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--measure") == 0) return measure(), 0;
  check_dtypes();
  check_tensors();
  check_launches();
}
