// The settings of the process, as runtime.h sets them and the environment gives them.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "opwright/triton/runtime.h"
#include "pack.h"

#ifndef OPWRIGHT_TRITON_WORKER_DIR
#error "define OPWRIGHT_TRITON_WORKER_DIR as the folder of the worker package"
#endif

namespace opwright::triton::detail {

// OPWRIGHT_TRITON is a list such as
// "python=/opt/venv/bin/python,record=keys.jsonl,pack=app.opk,freeze,tune,check".
struct ProcessSettings {
  std::string python, cache_dir, record;
  std::string worker = OPWRIGHT_TRITON_WORKER_DIR;  // the folder of the package `worker`
  int workers = 2;
  int timeout_s = 600;
  bool tunes = false;
  bool checks_pointers = false;
  bool is_frozen = false;
  Compiler compiler = nullptr;
  std::vector<std::shared_ptr<const Pack>> packs;
};

extern std::mutex settings_mutex;

// A snapshot that later changes leave alone.
std::shared_ptr<const ProcessSettings> process_settings();

const LaunchHooks* launch_hooks();
ScratchAllocator scratch_allocator();

}  // namespace opwright::triton::detail
