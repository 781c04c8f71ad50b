// The runtime as a shared library that Python calls with launches as JSON, on real memory.
#define main triton_runner_main
#include "../native/triton_runner.cpp"
#undef main

// Returns null, or what went wrong; the text lives until the thread's next call.
extern "C" const char* triton_launch(const char* request) {
  static thread_local std::string text;
  try {
    run(detail::parse_json(request));
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}

extern "C" void triton_freeze() { freeze(); }
extern "C" const char* triton_load_pack(const char* path) {
  static thread_local std::string text;
  try {
    load_pack(path);
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}
