// What happens on a miss: description, key, compiled kernel, entry.
#include <cstring>
#include <stdexcept>

#include "opwright/triton/error.h"
#include "process_settings.h"
#include "special.h"
#include "state.h"

namespace opwright::triton::detail {
namespace {

constexpr size_t kFirstTableSize = 16;

// Makes a context current, as the CUDA runtime does: of the GPU of an argument, else of GPU 0.
void ensure_context(const Call& call) {
  const Driver& cuda_driver = driver();
  Context context = nullptr;
  check(cuda_driver.context_get(&context), "cuCtxGetCurrent");
  if (context) return;
  const uint64_t gpus = call.devices & ~kHostBit;
  Device device = 0;
  check(cuda_driver.device_get(&device, gpus ? __builtin_ctzll(gpus) : 0), "cuDeviceGet");
  check(cuda_driver.primary_retain(&context, device), "cuDevicePrimaryCtxRetain");
  check(cuda_driver.context_set(context), "cuCtxSetCurrent");
}

const Description& ensure_description(KernelState& kernel) {
  const Description* known = kernel.description.load(std::memory_order_acquire);
  if (known) return *known;
  // Asked without the lock: it may take a second, and a second answer does no harm.
  std::unique_ptr<Description> found = obtain_description(kernel.file, kernel.function);
  const std::lock_guard lock(shared().mutex);
  known = kernel.description.load(std::memory_order_acquire);
  if (known) return *known;
  if (!kernel.table.load())
    kernel.table.store(new Table(kFirstTableSize), std::memory_order_release);
  known = found.release();  // never freed: launches read it without a lock
  kernel.description.store(known, std::memory_order_release);
  return *known;
}

int architecture_of(Device device) {
  int major = 0, minor = 0;
  check(driver().device_attribute(&major, kComputeMajor, device), "cuDeviceGetAttribute");
  check(driver().device_attribute(&minor, kComputeMinor, device), "cuDeviceGetAttribute");
  return 10 * major + minor;
}

bool is_capturing(Stream stream) {
  int status = 0;
  const Result result = driver().stream_capturing(stream, &status);
  // The null stream cannot be asked while another stream is capturing: that is an answer, too.
  return result == kCaptureImplicit || (result == kSuccess && status != 0);
}

// The Python value of an argument by its name: given, decided by a decorator, a default, an option.
Value value_named(const Description& description, const Call& call, const std::vector<Node>& nodes,
                  const std::map<std::string, std::string>& decided,
                  const std::map<std::string, std::string>& options, std::string_view name) {
  const auto found = decided.find(std::string(name));
  if (found != decided.end()) return parse_value(found->second);
  const int index = description.index_of(name);
  if (index < 0) {
    const auto option = options.find(std::string(name));
    return option == options.end() ? Value() : parse_value(option->second);
  }
  if (nodes[index].code == kAbsent) return parse_value(description.parameters[index].default_value);
  return node_value(nodes[index], call.slots);
}

// What a configuration (or none) and the heuristics give; the configuration's options join the
// kernel's.
std::map<std::string, std::string> decide(const Description& description,
                                          const Configuration* configuration, const Call& call,
                                          const std::vector<Node>& nodes,
                                          std::map<std::string, std::string>& options) {
  std::map<std::string, std::string> decided;
  if (configuration) {
    decided = configuration->constexprs;
    for (const auto& [name, value] : configuration->options) {
      if (!options.emplace(name, value).second) {
        throw Error(Cause::kArgument,
                    subject_of(description) + ": the option `" + name +
                        "` is bound, and its @triton.autotune decides it\n\nhint: leave one out.");
      }
    }
  }
  for (const Heuristic& heuristic : description.heuristics) {
    decided[heuristic.name] =
        value_text_of(evaluate_heuristic(description, heuristic, [&](std::string_view name) {
          return value_named(description, call, nodes, decided, options, name);
        }));
  }
  return decided;
}

// The compiled kernel of a key.
std::shared_ptr<Compiled> compiled_kernel(KernelState& kernel, const Description& description,
                                          int arch, const std::vector<std::string>& classes,
                                          const std::map<std::string, std::string>& options,
                                          bool capturing) {
  const std::string key = std::to_string(arch) + " " + key_text(classes, options);
  return make_once(
      &kernel, key,
      [&]() -> std::optional<std::shared_ptr<Compiled>> {
        const auto found = kernel.compiled.find(key);
        if (found == kernel.compiled.end()) return {};
        return found->second;
      },
      [&] { return obtain_compiled(description, kernel.file, arch, classes, options, capturing); },
      [&](const std::shared_ptr<Compiled>& compiled) { kernel.compiled[key] = compiled; });
}

// Its function in the current context.
LoadedFunction loaded_function(Compiled& compiled, Context context, Device device,
                               const std::string& subject, bool capturing) {
  return make_once(
      &compiled, std::to_string(reinterpret_cast<uintptr_t>(context)),
      [&]() -> std::optional<LoadedFunction> {
        for (const auto& [known, function] : compiled.functions) {
          if (known == context) return function;
        }
        return {};
      },
      [&] { return compiled.load(device, subject, capturing); },
      [&](const LoadedFunction& function) { compiled.functions.emplace_back(context, function); });
}

void fill_launch(Entry& entry, const Compiled& compiled, bool is_oversize) {
  entry.ctas = compiled.ctas;
  LaunchConfig& config = entry.config;
  config.block_x = 32 * compiled.warps;
  config.block_y = config.block_z = 1;
  config.shared_bytes = compiled.shared;
  config.attributes = entry.attributes;
  const auto add = [&](AttributeId id) -> LaunchAttribute& {
    LaunchAttribute& attribute = entry.attributes[config.attribute_count++];
    attribute.id = id;
    return attribute;
  };
  if (compiled.is_pdl) add(kProgrammaticSerialization).value = 1;
  if (compiled.is_cooperative) add(kCooperative).value = 1;
  if (compiled.ctas > 1) {
    LaunchAttribute& cluster = add(kClusterDimension);
    cluster.words[0] = compiled.ctas;
    cluster.words[1] = cluster.words[2] = 1;
    add(kClusterPolicy).value = 1;  // spread
  }
  if (is_oversize) add(kSharedMemoryMode).value = 3;
}

void insert(const Table& table, const Entry* entry) {
  size_t at = entry->hash & table.mask;
  while (table.slots[at].load(std::memory_order_relaxed)) at = (at + 1) & table.mask;
  table.slots[at].store(entry, std::memory_order_release);
}

// Publishes an entry. A table that is half full is replaced by one twice as large, and kept: a
// launch in another thread may be reading it.
void publish(KernelState& kernel, const Entry* entry) {
  const std::lock_guard lock(shared().mutex);
  const Table* table = kernel.table.load(std::memory_order_relaxed);
  if (2 * (kernel.entry_count + 1) > table->mask + 1) {
    auto* larger = new Table(2 * (table->mask + 1));
    for (size_t i = 0; i <= table->mask; ++i) {
      if (const Entry* known = table->slots[i].load(std::memory_order_relaxed))
        insert(*larger, known);
    }
    kernel.table.store(larger, std::memory_order_release);
    table = larger;
  }
  insert(*table, entry);
  ++kernel.entry_count;
}

// Makes the entry of one call, for one configuration.
struct Maker {
  KernelState& kernel;
  const Description& description;
  Call& call;
  const std::vector<std::string>& texts;
  Context context;
  Device device;
  int arch;
  bool capturing;

  std::unique_ptr<Entry> make(const Configuration* configuration) const {
    auto entry = std::make_unique<Entry>();
    entry->nodes = read_call(description, call, texts);
    std::map<std::string, std::string> options = kernel.options;
    const auto decided = decide(description, configuration, call, entry->nodes, options);
    complete_call(description, decided, entry->nodes);
    const std::vector<std::string> classes = class_texts(description, entry->nodes);
    const std::string subject = subject_of(description);
    entry->compiled = compiled_kernel(kernel, description, arch, classes, options, capturing);
    const LoadedFunction loaded =
        loaded_function(*entry->compiled, context, device, subject, capturing);
    entry->function = loaded.function;
    plan_parameters(*entry, *entry->compiled, entry->nodes, call.slot_count, subject);
    fill_launch(*entry, *entry->compiled, loaded.is_oversize);
    entry->device = device;
    entry->context = context;
    entry->foreign_devices = ~(1ull << device);
    entry->hash = call.hash;
    entry->word_count = call.full_word_count;
    entry->words = std::make_unique<uint64_t[]>(entry->word_count);
    std::memcpy(entry->words.get(), call.words, 8 * size_t{entry->word_count});
    return entry;
  }
};

std::vector<Candidate> all_candidates(const Maker& maker) {
  std::vector<Candidate> candidates;
  for (const Configuration& configuration : maker.description.configurations) {
    Candidate& candidate = candidates.emplace_back();
    try {
      candidate.entry = maker.make(&configuration);
    } catch (const Error& error) {
      if (error.cause() == Cause::kInterrupted) throw;
      // Too much shared memory for this GPU, for one: Triton passes over such a configuration, too.
      candidate.failure = error;
    }
  }
  return candidates;
}

// The entry of an autotuned kernel: by the packs' tables, or measured now where that is asked for.
std::unique_ptr<Entry> tuned_entry(const Maker& maker, Stream stream, const GridOfCall& grid) {
  const Description& description = maker.description;
  const std::vector<Node> nodes = read_call(description, maker.call, maker.texts);
  std::vector<Value> key;
  for (const std::string& name : description.tuning_key) {
    key.push_back(value_named(description, maker.call, nodes, {}, maker.kernel.options, name));
  }
  const std::vector<std::string> texts = tuning_texts(key, nodes);
  Choice choice = choose_configuration(description, maker.arch, texts);
  // What a launch overwrites cannot be restored without its size: such kernels are measured
  // offline.
  const bool is_repeatable = description.reset_to_zero.empty() && description.restore_value.empty();
  if (!choice.is_exact && process_settings()->tunes && grid.compute && is_repeatable &&
      !maker.capturing) {
    std::string name = std::to_string(maker.device);
    for (const std::string& text : texts) name += "\n" + text;
    std::vector<Candidate> candidates;
    choice.index = make_once(
        &maker.kernel, "tune",
        [&]() -> std::optional<size_t> {
          const auto known = maker.kernel.tuned.find(name);
          if (known == maker.kernel.tuned.end()) return {};
          return known->second;
        },
        [&] {
          candidates = all_candidates(maker);
          return fastest(maker.kernel, candidates, maker.call, stream, grid);
        },
        [&](size_t index) { maker.kernel.tuned[name] = index; });
    if (!candidates.empty()) return std::move(candidates[choice.index].entry);
  }
  return maker.make(&description.configurations[choice.index]);
}

}  // namespace

const Entry* resolve(KernelState* kernel, Call& call, std::vector<std::string> texts, Stream stream,
                     GridOfCall grid) {
  ensure_context(call);
  const Description& description = ensure_description(*kernel);
  // The masks were not known, or the context was not current, when the call was looked up.
  if (const Entry* entry = find(kernel, call)) return entry;

  Device device = 0;
  Context context = nullptr;
  check(driver().context_get(&context), "cuCtxGetCurrent");
  check(driver().context_device(&device), "cuCtxGetDevice");
  const int arch = architecture_of(device);
  const bool capturing = is_capturing(stream);

  const Maker maker{*kernel, description, call, texts, context, device, arch, capturing};
  std::unique_ptr<Entry> entry;
  if (description.configurations.empty()) {
    entry = maker.make(nullptr);
  } else {
    entry = tuned_entry(maker, stream, grid);
  }
  const Entry* published = entry.release();  // never freed: launches read it without a lock
  publish(*kernel, published);
  return published;
}

namespace {

bool are_alike(uint8_t one, uint8_t other) {
  const int a = one & kKindBits, b = other & kKindBits;
  const bool are_integers = a >= kI32 && a <= kU64 && b >= kI32 && b <= kU64;
  return a == b || are_integers;
}

// Whether the items of two arguments that are alike are alike too, where these are tuples. Moves
// past the payloads of both.
bool have_same_items(uint8_t code, const uint64_t*& one, const uint64_t*& other) {
  const int kind = code & kKindBits;
  if (kind >= kDescriptor && kind < kPointer) ++one, ++other;
  if (kind != kTuple) return true;
  const auto* items = reinterpret_cast<const unsigned char*>(one);
  const auto* others = reinterpret_cast<const unsigned char*>(other);
  size_t count = 0;
  for (; items[count] != kTupleEnd; ++count) {
    if (!are_alike(items[count], others[count])) return false;
  }
  if (others[count] != kTupleEnd) return false;
  one += count / 8 + 1, other += count / 8 + 1;
  for (size_t i = 0; i < count; ++i) {
    if (!have_same_items(items[i], one, other)) return false;
  }
  return true;
}

}  // namespace

void check_bound(const KernelState* kernel, const Entry* entry, const Call& call) {
  const auto* bound = reinterpret_cast<const unsigned char*>(entry->words.get());
  const auto* given = reinterpret_cast<const unsigned char*>(call.words);
  const size_t count = 8 * size_t{call.code_words};
  bool is_same = call.word_count <= entry->word_count && call.name_count == 0;
  for (size_t i = 0; is_same && i < count; ++i) is_same = are_alike(bound[i], given[i]);
  const uint64_t* one = entry->words.get() + call.code_words;
  const uint64_t* other = call.words + call.code_words;
  for (size_t i = 0; is_same && i < count; ++i) is_same = have_same_items(given[i], one, other);
  if (is_same) return;
  throw Error(Cause::kArgument,
              subject_of(*kernel->description.load(std::memory_order_acquire)) +
                  ": a bound kernel is called with arguments of other types\n\n  bound  " +
                  entry->compiled->key + "\n\nhint: bind it again, or call the Kernel itself.");
}

int64_t meta_value(const Entry* entry, const Call& call, const KernelState* kernel,
                   std::string_view name) {
  const Description& description = *kernel->description.load(std::memory_order_acquire);
  const int index = description.index_of(name);
  const Value value = index < 0 ? Value() : node_value(entry->nodes[index], call.slots);
  if (value.type != Value::Type::kInt && value.type != Value::Type::kBool) {
    throw Error(Cause::kArgument, subject_of(description) + ": the grid asks for `" +
                                      std::string(name) +
                                      "`, which is not an integer argument of the kernel");
  }
  return value.integer;
}

Grid named_grid(const KernelState* kernel, const Entry* entry, const Call& call,
                std::string_view name) {
  const Description& description = *kernel->description.load(std::memory_order_acquire);
  const auto found = description.grids.find(name);
  const auto refuse = [&](const std::string& why) {
    return Error(Cause::kKernelFile,
                 subject_of(description) + ": the grid `" + std::string(name) + "` " + why +
                     "\n\nhint: pass a functor: [&](const Meta& meta) { return Grid{...}; }");
  };
  if (found == description.grids.end())
    throw refuse("is not a function or lambda of one parameter in its file");
  if (!found->second.expression) throw refuse("cannot be translated: " + found->second.error);
  Value value;
  try {
    value = found->second.expression->evaluate([&](std::string_view argument) -> Value {
      const int index = description.index_of(argument);
      if (index >= 0) return node_value(entry->nodes[index], call.slots);
      const std::string text(argument);
      if (text == "num_warps") return Value::of_int(entry->compiled->warps);
      if (text == "num_ctas") return Value::of_int(entry->compiled->ctas);
      throw std::runtime_error("`" + text + "` is not an argument of the kernel");
    });
  } catch (const std::runtime_error& error) {
    throw refuse(std::string("fails: ") + error.what());
  }
  const std::vector<Value> sizes =
      value.type == Value::Type::kTuple ? value.items : std::vector<Value>{value};
  int64_t extents[3] = {1, 1, 1};
  if (sizes.empty() || sizes.size() > 3) throw refuse("gives no tuple of one to three sizes");
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i].type != Value::Type::kInt || sizes[i].integer < 0) {
      throw refuse("gives an invalid number of programs: " + value_text_of(sizes[i]));
    }
    extents[i] = sizes[i].integer;
  }
  return {extents[0], extents[1], extents[2]};
}

}  // namespace opwright::triton::detail
