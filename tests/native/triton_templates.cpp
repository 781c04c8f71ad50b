// Launches kernels through the templates and through dynamic arguments, for
// tests/integration/triton/test_runtime_templates.py.
//
//   triton_templates KERNELS.py FOLDER
//
// FOLDER/results.jsonl has one line for each case: its name, the key that a person expects, the
// keys that hooks saw (the template call's, then the dynamic one's), the stub's record of it, and
// the error. Each case is launched four times: template and dynamic, without hooks and with them,
// for these take different paths.
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <memory>

#include "../../src/opwright/native/src/triton/json.h"
#include "opwright/triton.h"
#include "opwright/triton/operator.h"

using namespace opwright::triton;
using opwright::triton::detail::json_quoted;

namespace mine {
struct Tensor {
  float* data;
  bool is_defined = true;
};
}  // namespace mine

template <>
struct opwright::triton::as_pointer<mine::Tensor> {
  static Pointer get(const mine::Tensor& tensor) {
    return tensor.is_defined ? Pointer{tensor.data, DType::fp32} : Pointer{};
  }
};

namespace {

std::string file, folder;
int case_count = 0;
std::ofstream results;
std::vector<std::string> keys;

template <typename F>
F* stub(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<F*>(dlsym(library, name));
}

int64_t launches() { return stub<int64_t(const char*)>("stub_count")("cuLaunchKernelEx"); }

void see(const LaunchInfo& launch, void*) { keys.push_back(launch.key); }
const LaunchHooks kHooks{see, nullptr, nullptr};

template <typename Launch>
void report(const std::string& name, const std::string& expected, const Launch& launch_all) {
  keys.clear();
  const std::string record = folder + "/" + std::to_string(case_count++) + ".jsonl";
  stub<int(const char*)>("stub_record")(record.c_str());
  std::string error;
  try {
    launch_all();
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  set_launch_hooks(nullptr);
  results << "{\"name\": " << json_quoted(name) << ", \"expected\": " << json_quoted(expected)
          << ", \"keys\": [";
  for (size_t i = 0; i < keys.size(); ++i) results << (i ? ", " : "") << json_quoted(keys[i]);
  results << "], \"record\": " << json_quoted(record) << ", \"error\": " << json_quoted(error)
          << "}\n";
  results.flush();
}

template <typename... A>
void same(const std::string& name, const std::string& expected, const Kernel& kernel,
          const std::vector<Argument>& arguments, const A&... template_arguments) {
  report(name, expected, [&] {
    for (const LaunchHooks* hooks : {static_cast<const LaunchHooks*>(nullptr), &kHooks}) {
      set_launch_hooks(hooks);
      kernel(nullptr, Grid{3, 2, 1}, template_arguments...);
      launch(kernel, nullptr, Grid{3, 2, 1}, arguments);
    }
  });
}

Argument of_int(int64_t value) {
  Argument argument;
  argument.type = Argument::Type::kInt;
  argument.integer = value;
  return argument;
}
Argument of_unsigned(uint64_t value) {
  Argument argument = of_int(static_cast<int64_t>(value));
  argument.type = Argument::Type::kUnsigned;
  return argument;
}
Argument of_float(double value) {
  Argument argument;
  argument.type = Argument::Type::kFloat;
  argument.number = value;
  return argument;
}
Argument of_bool(bool value) {
  Argument argument = of_int(value);
  argument.type = Argument::Type::kBool;
  return argument;
}
Argument of_pointer(DType dtype, uint64_t address) {
  Argument argument;
  argument.type = Argument::Type::kPointer;
  argument.pointer = {reinterpret_cast<const void*>(address), dtype};
  return argument;
}
Argument of_text(std::string text) {
  Argument argument;
  argument.type = Argument::Type::kConstexpr;
  argument.text = std::move(text);
  return argument;
}
Argument of_tuple(std::vector<Argument> items) {
  Argument argument;
  argument.type = Argument::Type::kTuple;
  argument.items = std::move(items);
  return argument;
}
Argument of_descriptor(const TensorDescriptor& descriptor) {
  Argument argument;
  argument.type = Argument::Type::kDescriptor;
  argument.descriptor = descriptor;
  return argument;
}
Argument under(std::string name, Argument argument) {
  argument.name = std::move(name);
  return argument;
}

template <typename T>
T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

enum Plain { kFive = 5 };
enum class Small : uint8_t { kLast = 255 };
enum class Wide : uint64_t { kHuge = (1ull << 63) + 1 };
enum class Negative : int16_t { kLow = -16 };

constexpr int64_t kTwo31 = int64_t{1} << 31;
constexpr uint64_t kTwo63 = uint64_t{1} << 63;

// One argument before an int of 7.
template <typename A>
void value(const std::string& name, const std::string& expected, const Argument& dynamic,
           const A& argument) {
  same(name, expected + ", i32", Kernel(file, "plain"), {dynamic, of_int(7)}, argument, 7);
}
template <typename A>
void constant(const std::string& name, const std::string& text, const A& argument) {
  same(name, "=" + text + ", i32", Kernel(file, "constant"), {of_text(text), of_int(7)}, argument,
       7);
}

void numbers() {
  value("signed char", "i32", of_int(-5), static_cast<signed char>(-5));
  value("char", "i32", of_int('A'), 'A');
  value("unsigned char", "i32", of_int(255), static_cast<unsigned char>(255));
  value("short", "i32:16", of_int(-32768), static_cast<short>(-32768));
  value("unsigned short", "i32:16", of_int(48), static_cast<unsigned short>(48));
  value("int", "i32", of_int(17), 17);
  value("int of 1", "i32:1", of_int(1), 1);
  value("int of 0", "i32:16", of_int(0), 0);
  value("int of -1", "i32", of_int(-1), -1);
  value("least int", "i32:16", of_int(-kTwo31), std::numeric_limits<int>::min());
  value("unsigned", "i64:16", of_int(kTwo31), 1u << 31);
  value("unsigned below", "i32", of_int(kTwo31 - 1), (1u << 31) - 1);
  value("long", "i32:16", of_int(4096), 4096l);
  value("long long", "i64", of_int(-kTwo31 - 1), static_cast<long long>(-kTwo31 - 1));
  value("greatest long", "i64", of_int(INT64_MAX), INT64_MAX);
  value("least long", "i64:16", of_int(INT64_MIN), INT64_MIN);
  value("unsigned long of 1", "i32:1", of_unsigned(1), 1ul);
  value("unsigned long", "u64:16", of_unsigned(kTwo63), kTwo63);
  value("unsigned long long", "u64", of_unsigned(~0ull), ~0ull);
  value("unsigned long below", "i64", of_unsigned(kTwo63 - 1), kTwo63 - 1);
  value("size_t", "i32:16", of_int(16), size_t{16});
  value("enum", "i32", of_int(5), kFive);
  value("enum class of a byte", "i32", of_int(255), Small::kLast);
  value("enum class, negative", "i32:16", of_int(-16), Negative::kLow);
  value("enum class of 64 bits", "u64", of_unsigned(kTwo63 + 1), Wide::kHuge);
  value("true", "u1", of_bool(true), true);
  value("false", "u1", of_bool(false), false);
  value("float", "fp32", of_float(0.1f), 0.1f);
  value("double", "fp32", of_float(0.1), 0.1);
  value("negative zero", "fp32", of_float(-0.0), -0.0);
  value("infinity", "fp32", of_float(HUGE_VAL), HUGE_VAL);
  value("not a number", "fp32", of_float(std::nan("")), std::nan(""));
  value("double beyond floats", "fp32", of_float(1e300), 1e300);
}

template <typename T>
void pointer_to(const std::string& name, DType dtype) {
  value(name + " pointer", "*" + name + ":16", of_pointer(dtype, 0x1000), at<T>(0x1000));
  value("const " + name + " pointer", "*" + name, of_pointer(dtype, 0x1008), at<const T>(0x1008));
}

void pointers() {
  pointer_to<__half>("fp16", DType::fp16);
  pointer_to<__nv_bfloat16>("bf16", DType::bf16);
  pointer_to<float>("fp32", DType::fp32);
  pointer_to<double>("fp64", DType::fp64);
  pointer_to<__nv_fp8_e4m3>("fp8e4nv", DType::fp8e4nv);
  pointer_to<__nv_fp8_e5m2>("fp8e5", DType::fp8e5);
  pointer_to<int8_t>("i8", DType::i8);
  pointer_to<int16_t>("i16", DType::i16);
  pointer_to<int32_t>("i32", DType::i32);
  pointer_to<int64_t>("i64", DType::i64);
  pointer_to<uint8_t>("u8", DType::u8);
  pointer_to<uint16_t>("u16", DType::u16);
  pointer_to<uint32_t>("u32", DType::u32);
  pointer_to<uint64_t>("u64", DType::u64);
  pointer_to<bool>("u1", DType::u1);
  value("null of a type", "*fp32:16", of_pointer(DType::fp32, 0), static_cast<float*>(nullptr));
  static float no_data[2];  // where the glue lets views of empty tensors point
  value("empty view", "*fp32:16", of_pointer(DType::fp32, 0),
        opwright::View<const float, 2>{no_data + 1, {3, 0}, {0, 1}});
  value("view", "*fp32:16", of_pointer(DType::fp32, 0x1000),
        opwright::View<float, 1>{at<float>(0x1000), {3}, {1}});
  value("view of nothing", "none", Argument{}, opwright::View<float, 1>{});
  value("nullptr", "none", Argument{}, nullptr);
  value("nullopt", "none", Argument{}, std::nullopt);
  value("Pointer", "*bf16", of_pointer(DType::bf16, 0x1002),
        Pointer{at<void>(0x1002), DType::bf16});
  value("Pointer of nothing", "none", Argument{}, Pointer{});
  value("own tensor", "*fp32:16", of_pointer(DType::fp32, 0x2000), mine::Tensor{at<float>(0x2000)});
  value("own tensor, undefined", "none", Argument{}, mine::Tensor{nullptr, false});
  value("optional int", "i32", of_int(5), std::optional<int>(5));
  value("no optional int", "none", Argument{}, std::optional<int>());
  value("optional double", "fp32", of_float(2.5), std::optional<double>(2.5));
  value("no optional double", "none", Argument{}, std::optional<double>());
  value("optional bool", "u1", of_bool(true), std::optional<bool>(true));
  value("optional pointer", "*fp32", of_pointer(DType::fp32, 0x1004),
        std::optional<float*>(at<float>(0x1004)));
  value("optional own tensor", "*fp32:16", of_pointer(DType::fp32, 0x2000),
        std::optional<mine::Tensor>(mine::Tensor{at<float>(0x2000)}));
}

void tuples() {
  value("tuple", "(*fp32:16, i32)", of_tuple({of_pointer(DType::fp32, 0x1000), of_int(3)}),
        std::tuple(at<float>(0x1000), 3));
  value("tuple of one", "(fp32,)", of_tuple({of_float(2.5)}), std::tuple(2.5));
  value("empty tuple", "()", of_tuple({}), std::tuple());
  value("tuple of None", "(none, i32:1)", of_tuple({Argument{}, of_int(1)}),
        std::tuple(nullptr, 1));
  value("tuple with an optional", "(none, fp32, i32)",
        of_tuple({Argument{}, of_float(1.5), of_int(5)}),
        std::tuple(std::optional<double>(), std::optional<double>(1.5), 5));
  value("nested tuple", "(i32, (fp32, (*i64, u1)), i64)",
        of_tuple(
            {of_int(3),
             of_tuple({of_float(0.5), of_tuple({of_pointer(DType::i64, 0x1008), of_bool(true)})}),
             of_int(kTwo31 + 1)}),
        std::tuple(3, std::tuple(0.5f, std::tuple(at<int64_t>(0x1008), true)), kTwo31 + 1));
  value("tuple of seven", "(i32, i32, i32, i32, i32, i32, i32)",
        of_tuple({of_int(2), of_int(3), of_int(4), of_int(5), of_int(6), of_int(7), of_int(8)}),
        std::tuple(2, 3, 4, 5, 6, 7, 8));
  value("tuple of eight", "(i32, i32, i32, i32, i32, i32, i32, i32:16)",
        of_tuple({of_int(2), of_int(3), of_int(4), of_int(5), of_int(6), of_int(7), of_int(8),
                  of_int(16)}),
        std::tuple(2, 3, 4, 5, 6, 7, 8, 16));
  value("tuple of nine", "(i32, i32, i32, i32, i32, i32, i32, i32:16, fp32)",
        of_tuple({of_int(2), of_int(3), of_int(4), of_int(5), of_int(6), of_int(7), of_int(8),
                  of_int(16), of_float(1)}),
        std::tuple(2, 3, 4, 5, 6, 7, 8, 16, 1.0));
  value("tuple with a constant", "(=3, i32)", of_tuple({of_text("3"), of_int(5)}),
        std::tuple(cx(3), 5));
  value("pair", "(i32, i32)", of_tuple({of_int(5), of_int(7)}), std::pair(5, 7));
  value("pair of others", "(i64:16, i32:16)", of_tuple({of_int(int64_t{1} << 40), of_int(16)}),
        std::pair(int64_t{1} << 40, 16));
  value("tuple of a pair", "((i32, fp32), i32)",
        of_tuple({of_tuple({of_int(5), of_float(0.5)}), of_int(9)}),
        std::tuple(std::pair(5, 0.5), 9));
}

void constants() {
  constant("cx int", "1024", cx(1024));
  constant("cx negative", "-1", cx(-1));
  constant("cx least", "-9223372036854775808", cx(INT64_MIN));
  constant("cx greatest unsigned", "18446744073709551615", cx(~0ull));
  constant("cx 2^63", "9223372036854775808", cx(kTwo63));
  constant("cx 2^63 + 1", "9223372036854775809", cx(kTwo63 + 1));
  constant("cx char", "65", cx('A'));
  constant("cx enum", "255", cx(Small::kLast));
  constant("cx wide enum", "9223372036854775809", cx(Wide::kHuge));
  constant("cx true", "True", cx(true));
  constant("cx false", "False", cx(false));
  constant("cx one", "1", cx(1));
  constant("cx 1.0", "1.0", cx(1.0));
  constant("cx half", "0.5", cx(0.5));
  constant("cx float", "0.10000000149011612", cx(0.1f));
  constant("cx small", "1e-05", cx(1e-5));
  constant("cx large", "1e+16", cx(1e16));
  constant("cx infinity", "inf", cx(HUGE_VAL));
  constant("cx minus infinity", "-inf", cx(-HUGE_VAL));
  constant("cx not a number", "nan", cx(std::nan("")));
  constant("cx text", "\"relu\"", cx("relu"));
  constant("cx empty text", "\"\"", cx(""));
  constant("cx std::string", "\"gelu\"", cx(std::string("gelu")));
  constant("cx char pointer", "\"tanh\"", cx(static_cast<const char*>("tanh")));
  constant("cx string_view", "\"silu\"", cx(std::string_view("silu")));
  constant("cx odd text", "\"a\\\"b\\\\c, (d); =\\u000a\xc3\xa9\"",
           cx("a\"b\\c, (d); =\n\xc3\xa9"));
  constant("cx fp16", "fp16", cx(DType::fp16));
  constant("cx bf16", "bf16", cx(DType::bf16));
  constant("cx fp8e4nv", "fp8e4nv", cx(DType::fp8e4nv));
  constant("cx int32", "int32", cx(DType::i32));
  constant("cx uint8", "uint8", cx(DType::u8));
  constant("cx int1", "int1", cx(DType::u1));
  constant("cx nullptr", "None", cx(nullptr));
  constant("cx function", "@helper", cx(Function{"helper"}));
  constant("cx tuple", "(1, 2)", cx(std::tuple(1, 2)));
  constant("cx tuple of one", "(16,)", cx(std::tuple(16)));
  constant("cx pair", "(1, 0.5)", cx(std::pair(1, 0.5)));
  constant("cx nested tuple", "(1, (\"a\", fp16), None, True)",
           cx(std::tuple(1, std::tuple(std::string("a"), DType::fp16), nullptr, true)));
  same("nullptr for a constexpr", "=None, i32", Kernel(file, "constant"), {Argument{}, of_int(7)},
       nullptr, 7);
}

void names() {
  const Kernel plain(file, "plain");
  same("by name", "*fp32:16, i32", plain,
       {under("p", of_pointer(DType::fp32, 0x1000)), under("tail", of_int(7))},
       named<"p">(at<float>(0x1000)), named<"tail">(7));
  same("by name, turned", "*fp32:16, i32", plain,
       {under("tail", of_int(7)), under("p", of_pointer(DType::fp32, 0x1000))}, named<"tail">(7),
       named<"p">(at<float>(0x1000)));
  same("by name, floats", "fp32, i32", plain, {under("tail", of_int(7)), under("p", of_float(0.5))},
       named<"tail">(7), named<"p">(0.5));
  same("by name, a tuple", "(i32, fp32), i32", plain,
       {under("tail", of_int(7)), under("p", of_tuple({of_int(5), of_float(0.5)}))},
       named<"tail">(7), named<"p">(std::tuple(5, 0.5)));
  same("one by name", "*fp32, i32:16", plain,
       {of_pointer(DType::fp32, 0x1004), under("tail", of_int(32))}, at<float>(0x1004),
       named<"tail">(32));
  same("constant by name", "=\"x\", i32", Kernel(file, "constant"),
       {under("tail", of_int(7)), under("C", of_text("\"x\""))}, named<"tail">(7),
       named<"C">(cx("x")));
  same("default", "*fp32:16, i32, =64", Kernel(file, "sized"),
       {of_pointer(DType::fp32, 0x1000), of_int(100)}, at<float>(0x1000), 100);
  const Kernel optioned = Kernel(file, "sized").with({{"num_warps", 8}, {"num_stages", 2}});
  same("options", "*fp32:16, i32, =128; num_stages=2, num_warps=8", optioned,
       {of_pointer(DType::fp32, 0x1000), of_int(100), of_text("128")}, at<float>(0x1000), 100,
       cx(128));
  const Kernel once(file, "sized", {{"num_warps", 2}, {"enable_fp_fusion", false}});
  same("options at construction", "*fp32:16, i32:1, =64; enable_fp_fusion=False, num_warps=2", once,
       {of_pointer(DType::fp32, 0x1000), of_int(1)}, at<float>(0x1000), 1);
  const TensorDescriptor source{{at<void>(0x10000), DType::fp16}, {256, 128}, {128, 1}, {64, 64}};
  TensorDescriptor target = source;
  target.base.address = at<void>(0x20000);
  target.pads_with_nan = true;
  same("descriptors", "tensordesc<fp16[64, 64]>, tensordesc<fp16[64, 64]>, i32:16",
       Kernel(file, "copies"), {of_descriptor(source), of_descriptor(target), of_int(64)}, source,
       target, 64);
}

// A grid in every form gives the launch of the same Grid.
template <typename G>
void grid(const std::string& name, const G& given, Grid expected) {
  const Kernel kernel(file, "sized");
  report(name, "*fp32:16, i32, =64", [&] {
    for (const LaunchHooks* hooks : {static_cast<const LaunchHooks*>(nullptr), &kHooks}) {
      set_launch_hooks(hooks);
      kernel(nullptr, given, at<float>(0x1000), 1000);
      kernel(nullptr, expected, at<float>(0x1000), 1000);
    }
  });
}

void grids() {
  grid("grid of int", 4, Grid{4});
  grid("grid of unsigned char", static_cast<unsigned char>(200), Grid{200});
  grid("grid of long", 70000l, Grid{70000});
  grid("grid of cdiv", cdiv(1000, 64), Grid{16});
  grid("grid of Grid", Grid{1, 2, 3}, Grid{1, 2, 3});
  grid(
      "grid of Meta", [](const Meta& meta) { return Grid{cdiv(meta["n"], meta["BLOCK"]), 2}; },
      Grid{16, 2, 1});
  grid("grid of the file", GridFunction{"sized_grid"}, Grid{16, 2, 1});
  const Kernel kernel(file, "sized");
  report("grid of a bound kernel", "*fp32:16, i32, =64", [&] {
    for (const LaunchHooks* hooks : {static_cast<const LaunchHooks*>(nullptr), &kHooks}) {
      set_launch_hooks(hooks);
      kernel.bind(at<float>(0x1000), 1001)(nullptr, Grid{5, 6}, at<float>(0x2000), 2001);
      kernel(nullptr, Grid{5, 6, 1}, at<float>(0x2000), 2001);
    }
  });
  report("bound to a tuple", "((*fp32:16, i32), fp32), i32", [&] {
    const Kernel plain(file, "plain");
    const auto nested = [](auto number) {
      return std::tuple(std::tuple(at<float>(0x1000), number), 0.5);
    };
    const FrozenKernel bound = plain.bind(nested(3), 7);
    for (const LaunchHooks* hooks : {static_cast<const LaunchHooks*>(nullptr), &kHooks}) {
      set_launch_hooks(hooks);
      bound(nullptr, Grid{1}, nested(int64_t{5}), 7);
      plain(nullptr, Grid{1}, nested(5), 7);
    }
  });
  report("prepared and bound", "*fp32:16, i32, =32", [&] {
    kernel.prepare(at<float>(0x1000), 1001, cx(32));
    const int64_t before = launches();
    const FrozenKernel bound = kernel.bind(at<float>(0x3000), 2001, cx(32));
    if (launches() != before) throw std::runtime_error("binding launches");
    for (const LaunchHooks* hooks : {static_cast<const LaunchHooks*>(nullptr), &kHooks}) {
      set_launch_hooks(hooks);
      bound(nullptr, Grid{7}, at<float>(0x1000), 3001, cx(32));
      kernel(nullptr, 7, at<float>(0x1000), 3001, cx(32));
    }
  });
}

// What must be refused: no launch may come of it.
void refusals() {
  const Kernel kernel(file, "sized");
  const auto refused = [&](const std::string& name, const auto& attempt) {
    report(name, "", attempt);
  };
  refused("grid of 2^32", [&] { kernel(nullptr, int64_t{1} << 32, at<float>(0x1000), 1000); });
  refused("grid of 2^32 + 1",
          [&] { kernel(nullptr, (int64_t{1} << 32) + 1, at<float>(0x1000), 1000); });
  refused("grid of -1", [&] { kernel(nullptr, -1, at<float>(0x1000), 1000); });
  refused("bound with fewer", [&] {
    const FrozenKernel bound = kernel.bind(at<float>(0x1000), 1000);
    bound(nullptr, Grid{1}, at<float>(0x1000));
  });
  refused("bound with more", [&] {
    const FrozenKernel bound = kernel.bind(at<float>(0x1000), 1000);
    bound(nullptr, Grid{1}, at<float>(0x1000), 1000, 5, 6.0);
  });
  refused("bound with others", [&] {
    const FrozenKernel bound = kernel.bind(at<float>(0x1000), 1000);
    bound(nullptr, Grid{1}, 0.5, at<float>(0x1000));
  });
  const Kernel plain(file, "plain");
  refused("bound with other items", [&] {
    const FrozenKernel bound = plain.bind(std::tuple(at<float>(0x1000), 3), 7);
    bound(nullptr, Grid{1}, std::tuple(2.5, 3), 7);
  });
  refused("bound with fewer items", [&] {
    const FrozenKernel bound = plain.bind(std::tuple(std::tuple(at<float>(0x1000), 3), 5), 7);
    bound(nullptr, Grid{1}, std::tuple(std::tuple(at<float>(0x1000)), 5), 7);
  });
  refused("dynamic name before position", [&] {
    launch(kernel, nullptr, Grid{1},
           std::vector{under("n", of_int(5)), of_pointer(DType::fp32, 0x1000)});
  });
  refused("name and position",
          [&] { kernel(nullptr, 1, at<float>(0x1000), 5, named<"p">(at<float>(0x1000))); });
}

// Hooks come in pairs, also where the driver refuses a launch.
void failures() {
  static int depth = 0;
  static const LaunchHooks hooks{[](const LaunchInfo&, void*) { ++depth; },
                                 [](const LaunchInfo&, void*) { --depth; }, nullptr};
  const Kernel kernel(file, "sized");
  report("hooks of a failed launch", "", [&] {
    kernel.prepare(at<float>(0x1000), 1000);
    set_launch_hooks(&hooks);
    stub<int(const char*, int, int)>("stub_fail")("cuLaunchKernelEx", 1, 701);
    try {
      kernel(nullptr, 1, at<float>(0x1000), 1000);
    } catch (const Error& error) {
      throw std::runtime_error(std::to_string(depth) + " open: " + error.what());
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  file = argv[1];
  folder = argv[2];
  results.open(folder + "/results.jsonl");
  for (const auto part : {numbers, pointers, tuples, constants, names, grids, refusals, failures})
    part();
}
