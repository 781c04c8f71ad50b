// Launches kernels through the C++ runtime as a JSON file says: the twin of
// tests/integration/triton/genuine_launch.py.
//
//   triton_runner LAUNCHES.json RESULTS.jsonl
//
// The launches have the same form; RESULTS has one line for each, {"error": null or {"cause",
// "message"}}. What reaches the driver is in the stub's own record. Beyond that form:
//
//   {"tensor": ..., "gpu": 1}         the Pointer's device; -2: the host
//   {"tensor": ..., "allocate": 1}    memory of that GPU, and so for {"descriptor": {...,
//   "allocate": 1}}
//   {"do": "capture", "stream": "new", "status": 1}   streams are captured from now on; no stream:
//   all
//   {"do": "fail", "name": ..., "nth": 1, "code": 2}  stub_fail
//   {"do": "freeze"}
#include <dlfcn.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

#include "../../src/opwright/native/src/triton/cuda.h"
#include "../../src/opwright/native/src/triton/json.h"
#include "opwright/triton.h"

using namespace opwright::triton;
using detail::Json;

namespace {

DType dtype_named(const std::string& name) {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (name == kDTypeNames[i]) return static_cast<DType>(i);
  }
  throw std::runtime_error("no dtype: " + name);
}

const void* address_of(const Json& value) { return reinterpret_cast<const void*>(value.integer); }

std::vector<int64_t> numbers(const Json& array) {
  std::vector<int64_t> found;
  for (const Json& item : array.items) found.push_back(item.integer);
  return found;
}

void use_device(int device);

// A function of the driver that the runtime has no need of, or of the stub.
template <typename... A>
int call(const char* name, A... arguments) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  void* const found = library ? dlsym(library, name) : nullptr;
  if (!found) throw std::runtime_error(std::string("no ") + name);
  return reinterpret_cast<int (*)(A...)>(found)(arguments...);
}

const void* allocate(int device) {
  detail::Context before = nullptr;
  detail::check(detail::driver().context_get(&before), "cuCtxGetCurrent");
  use_device(device);
  uint64_t address = 0;
  if (call("cuMemAlloc_v2", &address, size_t{4096}) != 0)
    throw std::runtime_error("cuMemAlloc failed");
  if (before) detail::check(detail::driver().context_set(before), "cuCtxSetCurrent");
  return reinterpret_cast<const void*>(address);
}

// A stream by its number, or one made at the first request of a name such as "new".
Stream stream_of(const Json& value) {
  static std::map<std::string, Stream> made;
  if (value.type != Json::Type::kString) return reinterpret_cast<Stream>(value.integer);
  Stream& stream = made[value.text];
  if (!stream) {
    detail::Context context = nullptr;
    if (detail::driver().context_get(&context) == 0 && !context) use_device(0);
    if (call("cuStreamCreate", &stream, 1u) != 0) throw std::runtime_error("cuStreamCreate failed");
  }
  return stream;
}

Argument read_argument(const Json& json) {
  using Type = Argument::Type;
  Argument argument;
  if (!json["tensor"].is_null()) {
    argument.type = Type::kPointer;
    argument.pointer = {address_of(json["address"]), dtype_named(json["tensor"].text)};
    if (!json["gpu"].is_null()) argument.pointer.device = static_cast<int>(json["gpu"].integer);
    if (!json["allocate"].is_null())
      argument.pointer.address = allocate(static_cast<int>(json["allocate"].integer));
  } else if (!json["int"].is_null()) {
    // Beyond 2^63 - 1 the JSON reader has a float; tests write such integers as text.
    argument.type = json["int"].type == Json::Type::kString ? Type::kUnsigned : Type::kInt;
    argument.integer = json["int"].type == Json::Type::kString
                           ? static_cast<int64_t>(std::stoull(json["int"].text))
                           : json["int"].integer;
  } else if (!json["float"].is_null()) {
    argument.type = Type::kFloat;
    argument.number = json["float"].number;
  } else if (!json["bool"].is_null()) {
    argument.type = Type::kBool;
    argument.integer = json["bool"].integer;
  } else if (!json["constexpr"].is_null()) {
    argument.type = Type::kConstexpr;
    argument.text = json["constexpr"].text;
  } else if (!json["tuple"].is_null()) {
    argument.type = Type::kTuple;
    for (const Json& item : json["tuple"].items) argument.items.push_back(read_argument(item));
  } else if (!json["descriptor"].is_null()) {
    const Json& given = json["descriptor"];
    argument.type = Type::kDescriptor;
    argument.descriptor.base = {address_of(given["address"]), dtype_named(given["dtype"].text)};
    if (!given["gpu"].is_null())
      argument.descriptor.base.device = static_cast<int>(given["gpu"].integer);
    if (!given["allocate"].is_null()) {
      argument.descriptor.base.address = allocate(static_cast<int>(given["allocate"].integer));
    }
    argument.descriptor.shape = numbers(given["shape"]);
    argument.descriptor.strides = numbers(given["strides"]);
    argument.descriptor.block = numbers(given["block"]);
    argument.descriptor.pads_with_nan = given["padding"].text == "nan";
    argument.descriptor.rounds_to_tf32 = given["round_f32_to_tf32"].truth();
  }
  return argument;
}

std::string option_text(const Json& value) {
  if (value.type == Json::Type::kBool) return value.integer ? "True" : "False";
  if (value.type == Json::Type::kString) return detail::json_quoted(value.text);
  return std::to_string(value.integer);
}

void use_device(int device) {
  const detail::Driver& driver = detail::driver();
  detail::Context context = nullptr;
  detail::check(driver.primary_retain(&context, device), "cuDevicePrimaryCtxRetain");
  detail::check(driver.context_set(context), "cuCtxSetCurrent");
}

// Requests other than launches.
bool act(const Json& request) {
  const std::string& what = request["do"].text;
  if (what == "capture") {
    const Stream stream = request["stream"].is_null() ? nullptr : stream_of(request["stream"]);
    call("stub_set_capturing", stream, static_cast<int>(request["status"].integer));
  } else if (what == "fail") {
    const std::string& name = request["name"].text;
    call("stub_fail", name.empty() ? nullptr : name.c_str(),
         static_cast<int>(request["nth"].integer), static_cast<int>(request["code"].integer));
  } else if (what == "freeze") {
    freeze();
  } else {
    return false;
  }
  return true;
}

void run(const Json& request) {
  if (act(request)) return;
  Kernel kernel(request["file"].text, request["function"].text);
  for (const auto& [name, value] : request["options"].fields) {
    Option option(name, 0);
    option.value = option_text(value);
    kernel = kernel.with({option});
  }
  std::vector<Argument> arguments;
  const Json& given = request["args"];
  for (const Json& item : given.items) arguments.push_back(read_argument(item));
  for (const auto& [name, value] : given.fields) {
    arguments.push_back(read_argument(value));
    arguments.back().name = name;
  }
  if (!request["device"].is_null()) use_device(static_cast<int>(request["device"].integer));
  const Stream stream = stream_of(request["stream"]);
  const Json& grid = request["grid"];
  const auto repeat = request["repeat"].is_null() ? 1 : request["repeat"].integer;
  for (int64_t i = 0; i < repeat; ++i) {
    if (grid.type == Json::Type::kString) {
      launch(kernel, stream, GridFunction{grid.text}, arguments);
    } else {
      const auto extent = [&](size_t at) {
        return grid[at].is_null() ? int64_t{1} : grid[at].integer;
      };
      launch(kernel, stream, Grid{extent(0), extent(1), extent(2)}, arguments);
    }
  }
}

void* scratch_of_test(size_t, size_t, Stream, void*) {
  return reinterpret_cast<void*>(0x7f0000000000);
}
void keep(void*, Stream, void*) {}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  std::ifstream file(argv[1]);
  std::ostringstream text;
  text << file.rdbuf();
  std::ofstream results(argv[2]);
  set_scratch_allocator({scratch_of_test, keep, nullptr});
  for (const Json& request : detail::parse_json(text.str()).items) {
    try {
      run(request);
      results << "{\"error\": null}\n";
    } catch (const Error& error) {
      results << "{\"error\": {\"cause\": " << static_cast<int>(error.cause())
              << ", \"message\": " << detail::json_quoted(error.what()) << "}}\n";
    } catch (const std::exception& error) {
      results << "{\"error\": {\"cause\": -1, \"message\": " << detail::json_quoted(error.what())
              << "}}\n";
    }
    results.flush();
  }
  return 0;
}
