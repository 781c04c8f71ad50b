// What a library registers with PyTorch, in a form that can be taken back, and whose errors reach
// the caller.
//
// Loaded by anyone else, a library registers while it is loaded, as ever. Opwright's loader names
// the library in OPWRIGHT_LOADS; it then registers nothing by itself, and the loader calls
// opwright_register: an exception in a static initialiser would end the process.
#pragma once
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#define OPWRIGHT_OWN \
  __attribute__((visibility("hidden")))  // each library has its own, whatever else is loaded

namespace opwright::extension {

class OPWRIGHT_OWN Registration {
 public:
  virtual bool owns_namespace() const = 0;
  virtual const char* name() const = 0;
  virtual void make() = 0;
  virtual void drop() = 0;

 protected:
  ~Registration() = default;
  void add();
  void remove();
};

OPWRIGHT_OWN inline std::vector<Registration*>& registrations() {
  static std::vector<Registration*> all;
  return all;
}

OPWRIGHT_OWN inline std::string& text() {
  static std::string text;
  return text;
}

}  // namespace opwright::extension

extern "C" {

// Registers all that is not registered. Returns what is wrong, or null.
__attribute__((visibility("default"), used)) inline const char* opwright_register() {
  using namespace opwright::extension;
  try {
    for (Registration* each : registrations()) each->make();
    return nullptr;
  } catch (const std::exception& error) {
    text() = error.what();
  } catch (...) {
    text() = "an exception of an unknown type";
  }
  for (Registration* each : registrations()) each->drop();
  return text().c_str();
}

__attribute__((visibility("default"), used)) inline void opwright_release() {
  auto& all = opwright::extension::registrations();
  for (auto each = all.rbegin(); each != all.rend(); ++each) (*each)->drop();
}

// Returns one line for each registration: "DEF name" for one that owns its namespace, else "USE
// name".
__attribute__((visibility("default"), used)) inline const char* opwright_registrations() {
  using namespace opwright::extension;
  text().clear();
  for (Registration* each : registrations())
    text().append(each->owns_namespace() ? "DEF " : "USE ").append(each->name()).append("\n");
  return text().c_str();
}

}  // extern "C"

namespace opwright::extension {

inline void Registration::add() {
  registrations().push_back(this);
  const char* loads = std::getenv("OPWRIGHT_LOADS");
  Dl_info own;
  bool is_loaded_by_opwright =
      loads && dladdr(reinterpret_cast<void*>(&text), &own) && !std::strcmp(own.dli_fname, loads);
  if (!is_loaded_by_opwright) make();
}

inline void Registration::remove() {
  auto& all = registrations();
  all.erase(std::remove(all.begin(), all.end(), this), all.end());
}

}  // namespace opwright::extension
