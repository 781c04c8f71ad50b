// Checks that say where they failed, for the adapters' tests.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include <opwright/triton.h>

#define EXPECT(CLAIM) \
  if (!(CLAIM)) std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #CLAIM), std::exit(1)

inline bool is_same(const opwright::triton::Pointer& a, const opwright::triton::Pointer& b) {
  return a.address == b.address && a.dtype == b.dtype && a.device == b.device;
}

// Whether a call throws Error(kArgument) with such a text.
template <typename Call>
bool refuses(const Call& call, std::string_view text) {
  try {
    call();
  } catch (const opwright::triton::Error& error) {
    const bool fits = error.cause() == opwright::triton::Cause::kArgument &&
                      std::string(error.what()).find(text) != std::string::npos;
    if (!fits) std::fprintf(stderr, "%s\n", error.what());
    return fits;
  }
  return false;
}
