// The coefficients behind math.h, one set per storage type. benchmarks/fit_math.py computes and
// prints every number here; the errors given are those of the fit, before rounding.
#pragma once

#include "opwright/types.h"
#include "opwright/vec.h"

namespace opwright::detail {

// c[0] + c[1] x + ..., every coefficient times `factor` (a constant power of two: no rounding).
template <typename V, int N>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V horner(const Lane<V> (&c)[N], V x, Lane<V> factor = 1) {
  V sum = splat<V>(c[N - 1] * factor);
  OPWRIGHT_UNROLL
  for (int i = N - 2; i >= 0; --i) sum = fma(sum, x, splat<V>(c[i] * factor));
  return sum;
}

// The same sum from its even and odd halves: half as many roundings build on each other. `square`
// is x * x, which the callers have.
template <typename V, int N>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V even_odd(const Lane<V> (&c)[N], V x, V square,
                                                Lane<V> factor = 1) {
  V last = splat<V>(c[N - 1] * factor), other = splat<V>(c[N - 2] * factor);
  OPWRIGHT_UNROLL
  for (int i = N - 3; i >= 0; --i) {
    const V next = fma(last, square, splat<V>(c[i] * factor));
    last = other;
    other = next;
  }
  return fma(last, x, other);
}

// P/Q = exp(z^2/2) Phi(-z) for z >= 0, Phi the normal distribution. Takes z and z^2; P/Q comes out
// divided by `factor` (a constant power of two).
template <typename V>
struct Quotient {
  V p, q;
};

// Fit<T> serves results stored as T. exp2 is 2^f for |f| <= 1/2, times a power of two. The arrays
// are local because device code may not take a reference to a namespace-scope constant.
template <typename T>
struct Fit;

template <>
struct Fit<float> {
  template <typename V>
  OPWRIGHT_HOST_DEVICE static OPWRIGHT_INLINE V exp2(V f, float factor) {  // 1.9e-9
    constexpr float c[] = {1.0f,           6.93147206e-1f, 2.40226469e-1f, 5.55032878e-2f,
                           9.61848905e-3f, 1.33999311e-3f, 1.53457911e-4f};
    return horner(c, f, factor);
  }
  // (2^f - 1)/f with the coefficients of exp2.
  template <typename V>
  OPWRIGHT_HOST_DEVICE static OPWRIGHT_INLINE V exp2_slope(V f) {
    constexpr float c[] = {6.93147206e-1f, 2.40226469e-1f, 5.55032878e-2f,
                           9.61848905e-3f, 1.33999311e-3f, 1.53457911e-4f};
    return horner(c, f);
  }
  // Relative error 6.1e-9 for z <= 14.75.
  template <typename V>
  OPWRIGHT_HOST_DEVICE static OPWRIGHT_INLINE Quotient<V> tail(V z, V square, Lane<V> factor = 1) {
    constexpr float p[] = {5.00000003e-1f, 4.38795911e-1f, 1.83606902e-1f, 4.07587273e-2f,
                           4.13498577e-3f};
    constexpr float q[] = {1.0f,           1.67547682f,    1.20404596f,
                           4.70452204e-1f, 1.02173256e-1f, 1.03647566e-2f};
    return {even_odd(p, z, square), even_odd(q, z, square, factor)};
  }
};

template <>
struct Fit<double> {
  template <typename V>
  OPWRIGHT_HOST_DEVICE static OPWRIGHT_INLINE V exp2(V f, double factor) {  // 3.1e-18
    return fma(exp2_slope(f) * factor, f, splat<V>(factor));
  }
  template <typename V>
  OPWRIGHT_HOST_DEVICE static OPWRIGHT_INLINE V exp2_slope(V f) {
    constexpr double c[] = {6.9314718055994533e-1, 2.4022650695910156e-1, 5.5504108664819921e-2,
                            9.618129107588336e-3,  1.3333558146789971e-3, 1.5403530462514066e-4,
                            1.5252733489946697e-5, 1.3215433089708934e-6, 1.017819803836793e-7,
                            7.0741056216950794e-9, 4.4352802119761036e-10};
    return horner(c, f);
  }
  // Relative error 9.2e-19 for z <= 39.
  template <typename V>
  OPWRIGHT_HOST_DEVICE static OPWRIGHT_INLINE Quotient<V> tail(V z, V square, Lane<V> factor = 1) {
    constexpr double p[] = {0.5,
                            8.2794486403463105e-1,
                            6.7964142049224193e-1,
                            3.5737062379557587e-1,
                            1.3205915119518661e-1,
                            3.5672321150753994e-2,
                            7.1239966271497138e-3,
                            1.0399131654149812e-3,
                            1.0659674570903229e-4,
                            6.9778187255584034e-6,
                            2.2425323608860724e-7};
    constexpr double q[] = {1.0,
                            2.4537742888721277,
                            2.8171114617705768,
                            2.0015453648303592,
                            9.8017425611092172e-1,
                            3.4835163081815126e-1,
                            9.1988943258642262e-2,
                            1.8123285542732184e-2,
                            2.6241665415071888e-3,
                            2.6776053627700351e-4,
                            1.7490797712764187e-5,
                            5.6211950225707562e-7};
    return {even_odd(p, z, square), even_odd(q, z, square, factor)};
  }
};

// Half an ulp of half is 2.4e-4.
template <>
struct Fit<half> {
  template <typename V>
  OPWRIGHT_HOST_DEVICE static OPWRIGHT_INLINE V exp2(V f, float factor) {  // 2.6e-6
    constexpr float c[] = {9.99999261e-1f, 6.93121815e-1f, 2.40247448e-1f, 5.59178604e-2f,
                           9.570103e-3f};
    return horner(c, f, factor);
  }
  // Relative error 7.0e-6 for z <= 6.
  template <typename V>
  OPWRIGHT_HOST_DEVICE static OPWRIGHT_INLINE Quotient<V> tail(V z, V square, Lane<V> factor = 1) {
    constexpr float p[] = {5.00003505e-1f, 2.54897148e-1f, 5.32906776e-2f};
    constexpr float q[] = {1.0f, 1.30793319f, 6.48676262e-1f, 1.33068083e-1f};
    return {even_odd(p, z, square), even_odd(q, z, square, factor)};
  }
};

// Half an ulp of bfloat16 is 2.0e-3.
template <>
struct Fit<bfloat16> {
  template <typename V>
  OPWRIGHT_HOST_DEVICE static OPWRIGHT_INLINE V exp2(V f, float factor) {  // 7.5e-5
    constexpr float c[] = {9.99928073e-1f, 6.93260989e-1f, 2.42611125e-1f, 5.5171657e-2f};
    return horner(c, f, factor);
  }
  // Relative error 2.5e-5 for z <= 14.75.
  template <typename V>
  OPWRIGHT_HOST_DEVICE static OPWRIGHT_INLINE Quotient<V> tail(V z, V square, Lane<V> factor = 1) {
    constexpr float p[] = {5.00012677e-1f, 2.79344325e-1f, 6.29802843e-2f};
    constexpr float q[] = {1.0f, 1.35735586f, 7.05112303e-1f, 1.57702478e-1f};
    return {even_odd(p, z, square), even_odd(q, z, square, factor)};
  }
};

}  // namespace opwright::detail
