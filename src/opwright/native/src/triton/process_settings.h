// The settings of the process, as runtime.h sets them and the environment gives them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "opwright/triton/runtime.h"
#include "pack.h"

namespace opwright::triton::detail {

// OPWRIGHT_TRITON is a list such as "python=/opt/venv/bin/python,record=keys.jsonl,pack=app.opk,freeze,check".
struct ProcessSettings {
  std::string python, cache_dir, record;
  int workers = 2;
  int timeout_s = 600;
  bool checks_pointers = false;
  bool is_frozen = false;
  Compiler compiler = nullptr;
  std::vector<std::shared_ptr<const Pack>> packs;
};

// A snapshot that later changes leave alone.
std::shared_ptr<const ProcessSettings> process_settings();

const LaunchHooks* launch_hooks();
ScratchAllocator scratch_allocator();

}  // namespace opwright::triton::detail
