// Where kernels come from: the packs that are loaded, the cache, a compile.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "opwright/triton/error.h"
#include "process_settings.h"
#include "state.h"
#include "worker.h"

namespace opwright::triton::detail {
namespace {

std::string base_name(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

// Whether two paths name one file as far as both say: the components at their ends agree.
bool same_file(const std::string& a, const std::string& b) {
  const auto components = [](const std::string& text) {
    std::vector<std::string> parts;
    for (const auto& part : std::filesystem::path(text).lexically_normal()) {
      if (part != "/" && part != ".") parts.push_back(part.string());
    }
    return parts;
  };
  const std::vector<std::string> x = components(a), y = components(b);
  return std::equal(x.rbegin(), x.rbegin() + static_cast<long>(std::min(x.size(), y.size())),
                    y.rbegin());
}

bool read_file(const std::string& path, std::string& text) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return false;
  std::ostringstream all;
  all << file.rdbuf();
  text = std::move(all).str();
  return !file.bad();
}

// Whether the kernel's own file, where it is present, is the one that a record was made from.
bool is_current(const Json& record, const std::string& file) {
  std::string text;
  if (!read_file(file, text)) return true;
  const std::string digest = hex(sha256(text));
  for (const Json& source : record["sources"].items) {
    if (base_name(source[0].text) == base_name(file) && source[1].text == digest) return true;
  }
  return record["sources"].items.empty();
}

// Whether every file that a cached record was made from is what it was.
bool is_unchanged(const Json& record) {
  for (const Json& source : record["sources"].items) {
    std::string text;
    if (!read_file(source[0].text, text) || hex(sha256(text)) != source[1].text) return false;
  }
  return !record["sources"].items.empty();
}

std::string absolute(const std::string& path) {
  return std::filesystem::absolute(path).lexically_normal().string();
}

// The directory of Opwright's store, which `store_root.py` makes and marks alike.
std::string store_of(const ProcessSettings& settings) {
  return settings.cache_dir + "/opwright-store";
}

std::string cache_path(const ProcessSettings& settings, const std::string& what) {
  return store_of(settings) + "/triton/" +
         hex(sha256(settings.python + "\n" + what)).substr(0, 32) + ".opk";
}

constexpr char kMarkerText[] =
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Builds of Opwright, made again when they are needed. `opwright cache clean` removes them.\n";

// Makes a directory of the store, unless it is there; returns what is wrong with it, "" if nothing
// is.
std::string make_private(const std::string& folder) {
  struct stat status;
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return std::strerror(errno);
  if (lstat(folder.c_str(), &status) != 0) return std::strerror(errno);
  if (!S_ISDIR(status.st_mode)) return "it is a symbolic link or a file";
  if (status.st_uid != geteuid()) return "it belongs to another user";
  return status.st_mode & (S_IWGRP | S_IWOTH) ? "others may write to it" : "";
}

// Marks the store's directory if it is new; returns what is wrong with it, "" if nothing is.
std::string mark(const std::string& store) {
  const std::string marker = store + "/CACHEDIR.TAG";
  std::error_code failed;
  // Before the marker is looked for: another process that makes the store writes the marker first.
  const bool is_new = std::filesystem::is_empty(store, failed);
  if (failed) return failed.message();
  if (!is_new)
    return std::filesystem::exists(marker, failed) ? ""
                                                   : "it has files, and Opwright has not made it";
  const int file = open(marker.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file < 0) return errno == EEXIST ? "" : std::strerror(errno);
  const bool is_written =
      write(file, kMarkerText, sizeof kMarkerText - 1) == sizeof kMarkerText - 1;
  close(file);
  return is_written ? "" : "its marker cannot be written";
}

// Makes the cache's folder in the store, private to its user.
void make_cache(const ProcessSettings& settings, const std::string& subject) {
  const std::string store = store_of(settings), folder = store + "/triton";
  std::error_code failed;
  std::filesystem::create_directories(settings.cache_dir, failed);
  std::string reason = failed ? failed.message() : make_private(store);
  if (reason.empty()) reason = mark(store);
  if (reason.empty()) reason = make_private(folder);
  if (reason.empty()) return;
  throw Error(Cause::kWorker, subject + ": the cache cannot be used\n\n  folder  " + folder +
                                  "\n  reason  " + reason +
                                  "\n\nhint: set OPWRIGHT_CACHE_DIR to a folder of your own.");
}

// A pack of the cache, if it is there and whole.
std::shared_ptr<const Pack> cached(const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status) != 0 || status.st_uid != geteuid()) return nullptr;
  try {
    return Pack::open(path);
  } catch (const Error&) {
    return nullptr;
  }
}

std::string list_json(const std::vector<std::string>& items) {
  std::string text = "[";
  for (const std::string& item : items) text += (text.size() > 1 ? ", " : "") + json_quoted(item);
  return text + "]";
}

// An option's value as JSON: its text is Python's, which differs in the words and in tuples.
std::string json_of(const std::string& text) {
  if (text == "True") return "true";
  if (text == "False") return "false";
  if (text == "None") return "null";
  if (text.starts_with("(")) {
    return "[" + text.substr(1, text.size() - (text.ends_with(",)") ? 3 : 2)) + "]";
  }
  return text;
}

std::string options_json(const std::map<std::string, std::string>& options) {
  std::string text = "{";
  for (const auto& [name, value] : options) {
    text += (text.size() > 1 ? ", " : "") + json_quoted(name) + ": " + json_of(value);
  }
  return text + "}";
}

std::vector<std::string> known_keys(const ProcessSettings& settings, const Description& description,
                                    const std::string& file, int arch) {
  std::vector<std::string> keys;
  for (const auto& pack : settings.packs) {
    for (const Json& record : pack->all()) {
      if (record["function"].text == description.function && record["arch"].integer == arch &&
          !record["key"].is_null() && same_file(record["file"].text, file)) {
        keys.push_back(record["key"].text);
      }
    }
  }
  return keys;
}

// The classes and options of a key.
std::vector<std::string> split_key(const std::string& key) {
  std::vector<std::string> parts;
  int depth = 0;
  std::string part;
  bool is_quoted = false;
  for (size_t i = 0; i < key.size(); ++i) {
    const char letter = key[i];
    if (is_quoted && letter == '\\' && i + 1 < key.size()) {
      part += letter;
      part += key[++i];
      continue;
    }
    if (letter == '"') is_quoted = !is_quoted;
    if (!is_quoted && (letter == '(' || letter == '[' || letter == '<')) ++depth;
    if (!is_quoted && (letter == ')' || letter == ']' || letter == '>')) --depth;
    if (!is_quoted && depth == 0 && (letter == ',' || letter == ';')) {
      parts.push_back(part);
      part.clear();
      ++i;  // the space
    } else {
      part += letter;
    }
  }
  parts.push_back(part);
  return parts;
}

// The key of a pack that differs in the fewest classes, and the first of these.
std::string nearest_key(const std::vector<std::string>& keys, const std::string& wanted) {
  const std::vector<std::string> target = split_key(wanted);
  std::string best;
  size_t least = SIZE_MAX;
  for (const std::string& key : keys) {
    const std::vector<std::string> parts = split_key(key);
    size_t different =
        std::max(parts.size(), target.size()) - std::min(parts.size(), target.size());
    for (size_t i = 0; i < std::min(parts.size(), target.size()); ++i)
      different += parts[i] != target[i];
    if (different < least) {
      least = different;
      best = key;
    }
  }
  return best;
}

Error missing(const ProcessSettings& settings, const Description& description,
              const std::string& file, int arch, const std::vector<std::string>& classes,
              const std::map<std::string, std::string>& options) {
  const std::string key = key_text(classes, options);
  std::string text = subject_of(description) +
                     ": it is in no pack, and the process is frozen\n\n  wanted   sm_" +
                     std::to_string(arch) + "  " + key;
  const std::vector<std::string> keys = known_keys(settings, description, file, arch);
  if (keys.empty()) {
    text += "\n  packs    " + (settings.packs.empty()
                                   ? "none is loaded"
                                   : "no kernel of it for sm_" + std::to_string(arch));
  } else {
    const std::string nearest = nearest_key(keys, key);
    text += "\n  nearest  sm_" + std::to_string(arch) + "  " + nearest;
    const std::vector<std::string> parts = split_key(nearest);
    bool differs = false;
    for (size_t i = 0; i < classes.size() && i < parts.size() && !differs; ++i) {
      if (parts[i] == classes[i]) continue;
      differs = true;
      text += "\n  differs  argument " + std::to_string(i + 1) + " `" +
              description.parameters[i].name + "`: " + parts[i] + " in the pack, " + classes[i] +
              " given";
    }
    if (!differs) text += "\n  differs  options";
  }
  text += "\n\nhint: add it: opwright pack build MANIFEST --out PACK --arch " +
          std::to_string(arch) +
          " with this line in the manifest:\n  {\"file\": " + json_quoted(file) +
          ", \"function\": " + json_quoted(description.function) +
          ", \"args\": " + list_json(classes) + ", \"options\": " + options_json(options) + "}";
  return Error(Cause::kPack, text);
}

// One line, in one write: several processes may append to the file.
void record_key(const ProcessSettings& settings, const Description& description,
                const std::string& file, int arch, const std::vector<std::string>& classes,
                const std::map<std::string, std::string>& options) {
  const int out = open(settings.record.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  // Where there is no file, a pack gave the kernel; its record has the name by which it is built.
  const std::string named = access(file.c_str(), R_OK) == 0 ? absolute(file) : description.file;
  const std::string line =
      "{\"file\": " + json_quoted(named) + ", \"function\": " + json_quoted(description.function) +
      ", \"args\": " + list_json(classes) + ", \"options\": " + options_json(options) +
      ", \"arch\": " + std::to_string(arch) + "}\n";
  const bool is_written =
      out >= 0 && write(out, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  const int code = errno;
  if (out >= 0) close(out);
  if (!is_written) {
    throw Error(Cause::kPack, "the record of keys cannot be written: " + settings.record + ": " +
                                  std::strerror(code));
  }
}

// 3.10 is newer than 3.9.
std::vector<int> version_of(const std::string& text) {
  std::vector<int> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, '.');) parts.push_back(std::atoi(part.c_str()));
  return parts;
}

// The kernel in the packs: of the first pack with one that the driver can load, and there of the
// newest Triton.
std::shared_ptr<Compiled> in_packs(const ProcessSettings& settings, const std::string& filed_under,
                                   const std::string& key, const std::string& file) {
  std::shared_ptr<Compiled> best;
  const int newest = loaded_driver ? loaded_driver->cuda_version : 0;
  for (const auto& pack : settings.packs) {
    for (const Json& record : pack->find(filed_under)) {
      if (record["key"].text != key || !same_file(record["file"].text, file)) continue;
      if (!settings.is_frozen && !is_current(record, file)) continue;
      std::shared_ptr<Compiled> found = read_compiled(pack, record);
      const bool loads = found->cuda <= newest;
      const bool best_loads = best && best->cuda <= newest;
      if (!best || (loads && !best_loads) ||
          (loads == best_loads && version_of(found->triton) > version_of(best->triton))) {
        best = std::move(found);
      }
    }
    if (best && best->cuda <= newest) return best;
  }
  return best;
}

}  // namespace

std::unique_ptr<Description> obtain_description(const std::string& file,
                                                const std::string& function) {
  const auto settings = process_settings();
  const std::string filed_under = "describe\n" + base_name(file) + "\n" + function;
  const std::string subject = "`" + function + "` (" + file + ")";
  const auto read = [&](const Json& record) {
    try {
      return read_description(record);
    } catch (const std::runtime_error& error) {
      throw Error(Cause::kPack, subject + ": its description cannot be read: " + error.what());
    }
  };
  for (const auto& pack : settings->packs) {
    for (const Json& record : pack->find(filed_under)) {
      if (same_file(record["file"].text, file) && (settings->is_frozen || is_current(record, file)))
        return read(record);
    }
  }
  if (settings->is_frozen) {
    throw Error(
        Cause::kPack,
        subject + ": it is in no pack, and the process is frozen\n\n  packs  " +
            (settings->packs.empty() ? std::string("none is loaded") : settings->packs[0]->name()) +
            "\n\nhint: run the application unfrozen under `opwright pack record`, then "
            "`opwright pack build`.");
  }
  if (access(file.c_str(), R_OK) != 0) {
    throw Error(Cause::kKernelFile,
                subject + ": the kernel's file cannot be read: " + std::strerror(errno) +
                    "\n\n  file  " + absolute(file) +
                    "\n\nhint: give its path from the working directory, or load a pack.");
  }
  const std::string path = cache_path(*settings, "describe\n" + absolute(file) + "\n" + function);
  if (const auto pack = cached(path)) {
    try {
      for (const Json& record : pack->find(filed_under)) {
        if (is_unchanged(record)) return read(record);
      }
    } catch (const Error&) {
      // A damaged entry of the cache is made again.
    }
  }
  make_cache(*settings, subject);
  const Json record =
      ask_worker(*settings,
                 "\"do\": \"describe\", \"file\": " + json_quoted(absolute(file)) +
                     ", \"function\": " + json_quoted(function) + ", \"out\": " + json_quoted(path),
                 subject);
  if (record["function"].text != function) {
    throw Error(Cause::kWorker, subject + ": the compile worker described another function: `" +
                                    record["function"].text + "`");
  }
  return read(record);
}

std::shared_ptr<Compiled> obtain_compiled(const Description& description, const std::string& file,
                                          int arch, const std::vector<std::string>& classes,
                                          const std::map<std::string, std::string>& options,
                                          bool is_capturing) {
  const auto settings = process_settings();
  const std::string key = key_text(classes, options);
  const auto filed_for = [&](int target) {
    return "kernel\n" + base_name(file) + "\n" + description.function + "\n" +
           std::to_string(target) + "\n" + key;
  };
  if (!settings->record.empty()) record_key(*settings, description, file, arch, classes, options);
  std::shared_ptr<Compiled> found = in_packs(*settings, filed_for(arch), key, file);
  // A cubin runs on GPUs of the same generation that are newer; from sm_90 on Triton's are for one
  // only.
  for (int older = arch - 1; !found && arch < 90 && older / 10 == arch / 10; --older) {
    found = in_packs(*settings, filed_for(older), key, file);
  }
  if (found) return found;
  if (settings->is_frozen) throw missing(*settings, description, file, arch, classes, options);
  const std::string subject = subject_of(description);
  if (is_capturing) {
    throw Error(Cause::kCapturing,
                subject +
                    ": it is not compiled yet, and cannot be while a graph is captured\n\n"
                    "  kernel  " +
                    key +
                    "\n\nhint: call `prepare` with the same arguments before "
                    "the capture.");
  }
  const std::string path =
      cache_path(*settings, "kernel\n" + absolute(file) + "\n" + description.function + "\n" +
                                std::to_string(arch) + "\n" + key);
  const auto take = [&](const std::shared_ptr<const Pack>& pack,
                        bool is_new) -> std::shared_ptr<Compiled> {
    if (!pack) return nullptr;
    for (const Json& record : pack->find(filed_for(arch))) {
      if (record["key"].text == key && (is_new || is_unchanged(record)))
        return read_compiled(pack, record);
    }
    return nullptr;
  };
  try {
    if ((found = take(cached(path), false))) return found;
  } catch (const Error&) {
    // A damaged entry of the cache is compiled again.
  }
  make_cache(*settings, subject);
  ask_worker(*settings,
             "\"do\": \"compile\", \"file\": " + json_quoted(absolute(file)) +
                 ", \"function\": " + json_quoted(description.function) +
                 ", \"arch\": " + std::to_string(arch) + ", \"args\": " + list_json(classes) +
                 ", \"options\": " + options_json(options) + ", \"out\": " + json_quoted(path),
             subject);
  if ((found = take(cached(path), true))) return found;
  throw Error(Cause::kWorker,
              subject +
                  ": the compile worker answered, but did not write this kernel\n\n  kernel  " +
                  key + "\n  file    " + path);
}

std::vector<std::string> tuning_texts(const std::vector<Value>& key,
                                      const std::vector<Node>& nodes) {
  std::vector<std::string> texts;
  for (const Value& value : key) texts.push_back(value_text_of(value));
  for (const Node& node : nodes) {
    const uint8_t kind = node.code & kKindBits;
    if (kind >= kPointer) texts.push_back(kDTypeNames[kind - kPointer]);
  }
  return texts;
}

Choice choose_configuration(const Description& description, int arch,
                            const std::vector<std::string>& texts) {
  const auto settings = process_settings();
  const std::string filed_under = "tuned\n" + base_name(description.file) + "\n" +
                                  description.function + "\n" + std::to_string(arch);
  // The distance of two keys: how far their numbers are apart, in powers of two. Texts must be
  // equal.
  const auto distance = [&](const Json& row) {
    if (row["key"].items.size() != texts.size()) return HUGE_VAL;
    double sum = 0;
    for (size_t i = 0; i < texts.size(); ++i) {
      if (row["key"][i].text == texts[i]) continue;
      const Value a = parse_value(texts[i]), b = parse_value(row["key"][i].text);
      if (!a.is_number() || !b.is_number()) return HUGE_VAL;
      sum += std::fabs(std::log2((std::fabs(a.as_double()) + 1) / (std::fabs(b.as_double()) + 1)));
    }
    return sum;
  };
  size_t best = 0;
  double least = HUGE_VAL;
  for (const auto& pack : settings->packs) {
    for (const Json& record : pack->find(filed_under)) {
      if (!same_file(record["file"].text, description.file)) continue;
      for (const Json& row : record["rows"].items) {
        const auto index = static_cast<size_t>(row["config"].integer);
        double apart = HUGE_VAL;
        try {
          apart = distance(row);
        } catch (const Error& error) {
          throw Error(Cause::kPack, "the pack " + pack->name() + " cannot be used: its table for " +
                                        subject_of(description) + ": " + error.what());
        }
        if (apart < least && index < description.configurations.size()) {
          least = apart;
          best = index;
        }
      }
    }
  }
  return {best, least == 0};
}

}  // namespace opwright::triton::detail
