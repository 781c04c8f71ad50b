// Of a library with kernels for several levels of x86-64: the best one that it holds
// (OPWRIGHT_HAS_v3, ...) and this machine can run; "" where there is none.

__attribute__((visibility("default"))) const char* opwright_level(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  __attribute__((unused)) const int v4 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl");
  __attribute__((unused)) const int bf16 = v4 && __builtin_cpu_supports("avx512bf16");
#if defined(OPWRIGHT_HAS_v4amx)
  if (bf16 && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16"))
    return "v4amx";
#endif
#if defined(OPWRIGHT_HAS_v4bf16)
  if (bf16) return "v4bf16";
#endif
#if defined(OPWRIGHT_HAS_v4)
  if (v4) return "v4";
#endif
#if defined(OPWRIGHT_HAS_v3)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")) {
    return "v3";
  }
#endif
#if defined(OPWRIGHT_HAS_v2)
  if (__builtin_cpu_supports("sse4.2")) return "v2";
#endif
  return "";
#else
  return "base";
#endif
}
