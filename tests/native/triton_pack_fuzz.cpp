// Launches every kernel of damaged packs on the stub driver, each pack in a process of its own.
//
//   triton_pack_fuzz GOOD.opk KERNELS.py FOLDER flip COUNT SEED     flips and cuts at places of the
//   seed's choice triton_pack_fuzz GOOD.opk KERNELS.py FOLDER files PACK...       packs that
//   someone else damaged
//
// Writes one line for each pack that did anything but the launches of the good one or an Error, as
// JSON: what it was, and "crash", "wrong" or "foreign" (an exception other than Error); then one
// with the numbers of all outcomes. With `files` a line for each pack, with the texts of its
// errors.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <sstream>

#include "../../src/opwright/native/src/triton/json.h"
#include "opwright/triton.h"

using namespace opwright::triton;

namespace {

std::string kernels, record;

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <typename T>
T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

void launch_one(int which) {
  const auto kernel = [](const char* function) { return Kernel(kernels, function); };
  const TensorDescriptor tile{{at<void>(0x10000), DType::fp16}, {256, 128}, {128, 1}, {64, 64}};
  switch (which) {
    case 0:
      kernel("left")(nullptr, 3, at<int32_t>(0x1000), 5, cx(1));
      break;
    case 1:
      kernel("right")(nullptr, 3, at<int32_t>(0x1000), 5, cx(1));
      break;
    case 2:
      kernel("mixed")(nullptr, 3, at<float>(0x1000), std::tuple(0.5, 3), 1.5, 7, cx(1));
      break;
    default:
      kernel("copies")(nullptr, 3, tile, tile, 64);
  }
}
constexpr int kLaunches = 4;

// Fails where the address sanitizer would only look the other way: memory that is exactly as large
// as the pack.
std::unique_ptr<unsigned char[]> exact(const std::string& bytes) {
  auto memory = std::make_unique<unsigned char[]>(bytes.size());
  std::memcpy(memory.get(), bytes.data(), bytes.size());
  return memory;
}

enum Outcome { kRight = 0, kRefused = 1, kWrong = 2, kForeign = 3, kCrash = 4 };
constexpr int kFirstStatus = 64;  // the exit status of kRight: a sanitizer's report ends with 1
const char* const kNames[] = {"right", "refused", "wrong", "foreign", "crash"};

// In the child: what each launch gave, and the worst of it.
int attempt(const std::string& bytes, const std::vector<std::string>& expected,
            std::vector<std::string>& found, std::string& errors) {
  int outcome = kRight;
  const auto guarded = [&](const auto& act) {
    try {
      act();
      return true;
    } catch (const Error& error) {
      outcome = std::max<int>(outcome, kRefused);
      errors += std::string(error.what()) + "\n";
    } catch (const std::exception& error) {
      outcome = std::max<int>(outcome, kForeign);
      errors += std::string(error.what()) + "\n";
    }
    return false;
  };
  const auto memory = exact(bytes);
  const bool is_loaded =
      guarded([&] { load_pack(std::span(memory.get(), bytes.size()), "fuzzed"); });
  freeze();
  size_t seen = 0;
  for (int i = 0; is_loaded && i < kLaunches; ++i) {
    const bool is_done = guarded([&] { launch_one(i); });
    const std::string all = read_text(record);
    found.push_back(all.substr(seen));
    seen = all.size();
    const std::string& wanted =
        is_done && !expected.empty() ? expected[static_cast<size_t>(i)] : found.back();
    if (found.back() != wanted || (!is_done && !found.back().empty())) outcome = kWrong;
  }
  return outcome;
}

int in_child(const std::string& bytes, const std::vector<std::string>& expected,
             std::string* errors) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) std::abort();
  std::cout.flush();
  const pid_t child = fork();
  if (child == 0) {
    close(pipe_ends[0]);
    if (!errors && !freopen("/dev/null", "w", stderr)) _exit(kFirstStatus + kCrash);
    truncate(record.c_str(), 0) == 0 || std::ofstream(record);
    const auto start = reinterpret_cast<int (*)(const char*)>(
        dlsym(dlopen("libcuda.so.1", RTLD_NOW), "stub_record"));
    start(record.c_str());
    std::vector<std::string> found;
    std::string text;
    const int outcome = attempt(bytes, expected, found, text);
    if (write(pipe_ends[1], text.data(), std::min<size_t>(text.size(), 4000)) < 0)
      _exit(kFirstStatus + kCrash);
    _exit(kFirstStatus + outcome);
  }
  close(pipe_ends[1]);
  char buffer[4096];
  const ssize_t count = read(pipe_ends[0], buffer, sizeof buffer);
  if (errors) errors->assign(buffer, count > 0 ? static_cast<size_t>(count) : 0);
  close(pipe_ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  const int outcome = WIFEXITED(status) ? WEXITSTATUS(status) - kFirstStatus : int{kCrash};
  return outcome >= kRight && outcome < kCrash ? outcome : int{kCrash};
}

void flip(const std::string& good, const std::vector<std::string>& expected, int count,
          unsigned seed) {
  std::mt19937 random(seed);
  const auto pick = [&](size_t size) {
    return std::uniform_int_distribution<size_t>(0, size - 1)(random);
  };
  uint64_t rows_at;
  std::memcpy(&rows_at, good.data() + 24, 8);
  std::map<std::string, int> outcomes;
  for (int i = 0; i < count; ++i) {
    std::string bytes = good;
    std::ostringstream what;
    if (i % 4 == 0) {  // cut, at the borders of the parts too
      const size_t borders[] = {
          0,  1,           8,       16,           32,           63,
          64, rows_at - 1, rows_at, rows_at + 16, rows_at + 40, good.size() - 1};
      const size_t size =
          static_cast<size_t>(i / 4) < std::size(borders) ? borders[i / 4] : pick(good.size());
      bytes.resize(size);
      what << "cut to " << size;
      // Every second one with a header that says so.
      if (i % 8 == 0 && size >= 24) std::memcpy(bytes.data() + 16, &size, 8);
    } else {
      const int flips = i % 4 == 1 ? 1 : 1 + static_cast<int>(pick(4));
      for (int j = 0; j < flips; ++j) {
        // Half of them where the structure is: cubins are most of the bytes.
        const size_t place = pick(2)   ? pick(good.size())
                             : pick(2) ? pick(64)
                                       : rows_at + pick(good.size() - rows_at);
        const int bit = static_cast<int>(pick(8));
        bytes[place] = static_cast<char>(bytes[place] ^ (1 << bit));
        what << "bit " << bit << " of " << place << " ";
      }
    }
    const int outcome = in_child(bytes, expected, nullptr);
    ++outcomes[kNames[outcome]];
    if (outcome > kRefused) {
      std::cout << "{\"what\": \"" << what.str() << "\", \"outcome\": \"" << kNames[outcome]
                << "\"}\n";
    }
  }
  std::cout << "{\"what\": \"all\"";
  for (const auto& [name, number] : outcomes) std::cout << ", \"" << name << "\": " << number;
  std::cout << "}\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) return 2;
  const std::string good = read_text(argv[1]);
  kernels = argv[2];
  record = std::string(argv[3]) + "/record.jsonl";
  const std::string mode = argv[4];
  if (!dlopen("libcuda.so.1", RTLD_NOW)) return 2;
  std::string errors;
  if (in_child(good, {}, &errors) != kRight) {
    std::cerr << "the good pack does not launch: " << errors;
    return 1;
  }
  std::vector<std::string> expected;
  std::istringstream lines(read_text(record));
  for (std::string line; std::getline(lines, line);) expected.push_back(line + "\n");
  if (mode == "flip") {
    flip(good, expected, std::atoi(argv[5]),
         argc > 6 ? static_cast<unsigned>(std::atoi(argv[6])) : 0);
    return 0;
  }
  for (int i = 5; i < argc; ++i) {
    const int outcome = in_child(read_text(argv[i]), expected, &errors);
    std::cout << "{\"what\": " << detail::json_quoted(argv[i]) << ", \"outcome\": \""
              << kNames[outcome] << "\", \"errors\": " << detail::json_quoted(errors) << "}\n";
  }
}
