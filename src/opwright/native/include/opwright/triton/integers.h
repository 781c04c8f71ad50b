// Python's integer arithmetic in 64 bits. A result that does not fit is refused; nothing wraps or
// traps.
#pragma once

#include <cstdint>

namespace opwright::triton::python {

// Every function calls its last argument, which throws, with the reason why there is no result.
inline constexpr char kTooLarge[] = "the result is beyond 64 bits";

template <typename Fail>
int64_t add(int64_t a, int64_t b, const Fail& fail) {
  int64_t sum;
  if (__builtin_add_overflow(a, b, &sum)) fail(kTooLarge);
  return sum;
}

template <typename Fail>
int64_t subtract(int64_t a, int64_t b, const Fail& fail) {
  int64_t difference;
  if (__builtin_sub_overflow(a, b, &difference)) fail(kTooLarge);
  return difference;
}

template <typename Fail>
int64_t multiply(int64_t a, int64_t b, const Fail& fail) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) fail(kTooLarge);
  return product;
}

template <typename Fail>
int64_t negate(int64_t a, const Fail& fail) {
  return subtract(0, a, fail);
}

template <typename Fail>
int64_t absolute(int64_t a, const Fail& fail) {
  return a < 0 ? negate(a, fail) : a;
}

// Rounds down.
template <typename Fail>
int64_t floor_divide(int64_t a, int64_t b, const Fail& fail) {
  if (b == 0) fail("division by zero");
  if (b == -1) return negate(a, fail);  // the processor traps on the smallest integer
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

// Has the sign of the divisor.
template <typename Fail>
int64_t modulo(int64_t a, int64_t b, const Fail& fail) {
  if (b == 0) fail("modulo by zero");
  if (b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

template <typename Fail>
double divide(int64_t a, int64_t b, const Fail& fail) {
  if (b == 0) fail("division by zero");
  // Exact for any 64-bit integer where a long double has 64 bits of mantissa.
  return static_cast<double>(static_cast<long double>(a) / static_cast<long double>(b));
}

template <typename Fail>
double divide(double a, double b, const Fail& fail) {
  if (b == 0) fail("division by zero");
  return a / b;
}

template <typename Fail>
int64_t power(int64_t base, int64_t exponent, const Fail& fail) {
  if (exponent < 0) fail("the exponent is negative, so the result is not an integer");
  if (base == 0 || base == 1) return exponent == 0 ? 1 : base;
  if (base == -1) return exponent % 2 ? -1 : 1;
  int64_t result = 1;  // overflows within 63 rounds
  for (int64_t i = 0; i < exponent; ++i) result = multiply(result, base, fail);
  return result;
}

template <typename Fail>
int64_t shift_left(int64_t a, int64_t bits, const Fail& fail) {
  if (bits < 0) fail("a negative shift");
  if (a == 0) return 0;
  if (bits > 63) fail(kTooLarge);
  const __int128 shifted = static_cast<__int128>(a) << bits;
  if (shifted != static_cast<int64_t>(shifted)) fail(kTooLarge);
  return static_cast<int64_t>(shifted);
}

template <typename Fail>
int64_t shift_right(int64_t a, int64_t bits, const Fail& fail) {
  if (bits < 0) fail("a negative shift");
  return a >> (bits > 63 ? 63 : bits);
}

// Triton's (a + b - 1) // b, whose sum may be beyond 64 bits where its result is not.
template <typename Fail>
int64_t cdiv(int64_t a, int64_t b, const Fail& fail) {
  if (b == 0) fail("division by zero");
  if (b > 0) return a / b + (a % b > 0);
  return add(floor_divide(subtract(a, 1, fail), b, fail), 1, fail);
}

// As Triton's: 0 if `a` is not positive.
template <typename Fail>
int64_t next_power_of_2(int64_t a, const Fail& fail) {
  if (a > int64_t{1} << 62) fail(kTooLarge);
  int64_t power = a <= 0 ? 0 : 1;
  while (power < a) power <<= 1;
  return power;
}

// The integer part of a float.
template <typename Fail>
int64_t truncate(double number, const Fail& fail) {
  if (!(number >= -0x1p63 && number < 0x1p63))
    fail(number == number ? kTooLarge : "NaN has no integer value");
  return static_cast<int64_t>(number);
}

}  // namespace opwright::triton::python
