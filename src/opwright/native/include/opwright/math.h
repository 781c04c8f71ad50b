// exp, sigmoid, tanh, the normal distribution and the GELU family with their derivatives, for
// float, double, Vec<float> and Vec<double>; under nvcc the scalar forms are device code too, which
// takes 2^f and 1/x in float from the special function unit.
//
// Every function is branch-free, keeps NaN and -0, is right at +-inf and loses no denormal result.
// f<T>(x) is accurate enough for a result stored as T and no more: gelu_tanh<bfloat16>(v). Without
// T the type of the lanes is meant: a function is right to 5 ulp in every tail, a derivative to an
// ulp of its largest value. Without hardware FMA the error of e^t grows to |t| ulp. The NOTES.md of
// bias_gelu and d_sigmoid have the derivations and the errors measured.
#pragma once

#include "opwright/math_tables.h"

namespace opwright {
namespace detail {

template <typename T, typename V>
struct StorageOf {
  using type = T;
};
template <typename V>
struct StorageOf<void, V> {
  using type = Lane<V>;
};
// The type that results are rounded to.
template <typename T, typename V>
using Storage = typename StorageOf<T, V>::type;
// Whether arguments of exponentials need more bits than one lane has: an error of one ulp in t
// is one of |t| ulp in e^t, and |t| reaches 103 (745 in double).
template <typename T>
inline constexpr bool kIsExact = sizeof(T) >= 4;
// Whether 2^t is one instruction that takes t as it is and is good enough for results of type T.
// Exponents are not split then: `whole` is 0 and `fraction` all of t.
template <typename T, typename V>
inline constexpr bool kIsUnsplit = kHasSpecialUnit && kSame<V, float> && !kIsExact<T>;

// The numbers that depend on the lane type. Limits lie just beyond the point from which the result
// is 0 (low) or does not change (high); arguments are clamped to them.
template <typename S>
struct Constants;
template <>
struct Constants<float> {
  static constexpr float kExpLow = -105, kExpHigh = 90;
  static constexpr float kExp2Low = -151, kExp2High = 129;
  static constexpr float kSigmoidLow = -105, kSigmoidHigh = 30;
  static constexpr float kTanhLow = -11.1f, kTanhHigh = 8;
  static constexpr float kQuickLow = -66, kQuickHigh = 16;
  static constexpr float kNormalHigh = 14.7f, kErfcHigh = 10.4f;
  static constexpr float kUp = 0x1p48f, kDown = 0x1p-48f;
  static constexpr int kUpLog2 = 48;
  static constexpr float kLog2e = 1.4426950216293335f, kLog2eRest = 1.9259629911266175e-8f;
  static constexpr float kQuick = 2.4554669857025146f, kQuickRest = -2.6109498929110908e-8f;
  static constexpr float kTanh1 = 2.3022079467773438f, kTanh1Rest = 2.5136698113913389e-7f;
  static constexpr float kTanh3 = 0.102935791015625f, kTanh3Rest = 7.4485643984874176e-6f;
  static constexpr float kSquareRounder = 0x1.8p18f;
};
template <>
struct Constants<double> {
  static constexpr double kExpLow = -746, kExpHigh = 711;
  static constexpr double kExp2Low = -1076, kExp2High = 1025;
  static constexpr double kSigmoidLow = -746, kSigmoidHigh = 50;
  static constexpr double kTanhLow = -21.65, kTanhHigh = 10;
  static constexpr double kQuickLow = -448, kQuickHigh = 30;
  static constexpr double kNormalHigh = 38.9, kErfcHigh = 27.5;
  static constexpr double kUp = 0x1p128, kDown = 0x1p-128;
  static constexpr int kUpLog2 = 128;
  static constexpr double kLog2e = 1.442695040888963387, kLog2eRest = 2.0355273740931032e-17;
  static constexpr double kQuick = 2.4554669595930156412, kQuickRest = 7.8165418472370753e-17;
  static constexpr double kTanh1 = 2.3022081981443278664, kTanh1Rest = -2.9772962085427412e-15;
  static constexpr double kTanh3 = 0.10294323973357677, kTanh3Rest = -1.5355328717954586e-10;
  static constexpr double kSquareRounder = 0x1.8p35;
};

inline constexpr double kTwiceSqrtTwoOverPi = 1.5957691216057307117;  // 2 sqrt(2/pi)
inline constexpr double kInverseSqrtTwoPi = 0.39894228040143267794;   // 1/sqrt(2 pi)
inline constexpr double kTwoOverSqrtPi = 1.1283791670955125739;       // 2/sqrt(pi)
inline constexpr double kSqrtTwo = 1.4142135623730950488;

// An exponent t = whole + fraction, |fraction| <= 1/2.
template <typename V>
struct Exponent {
  V whole, fraction;
};

// a * b, split. The product is not rounded before the integer is taken off.
template <typename T, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE Exponent<V> split_product(V a, V b) {
  if constexpr (kIsUnsplit<T, V>) return {V{}, a * b};
  const V rounder = splat<V>(FloatFormat<Lane<V>>::kRounder);
  const V whole = fma(a, b, rounder) - rounder;
  return {whole, fma(a, b, -whole)};
}

// x * (constant + rest), split; `rest` is the part of the constant that a lane cannot hold.
template <typename T, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE Exponent<V> split_multiple(V x, Lane<V> constant,
                                                                Lane<V> rest) {
  Exponent<V> t = split_product<T>(x, splat<V>(constant));
  if constexpr (kIsExact<T>) t.fraction = fma(x, splat<V>(rest), t.fraction);
  return t;
}

// -x^2 * (constant + rest), split. fma gives what the rounding of x^2 lost.
template <typename T, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE Exponent<V> split_square(V x, Lane<V> constant, Lane<V> rest) {
  const V square = x * x;
  Exponent<V> t = split_multiple<T>(square, -constant, -rest);
  if constexpr (kIsExact<T>) {
    t.fraction = fma(fma(x, x, -square), splat<V>(-constant), t.fraction);
  }
  return t;
}

// -2u log2(e) with u = sqrt(2/pi) (x + 0.044715 x^3), split; that is -x w, w = a + b x^2. Exact:
// x^2 is rounded to so few bits that w has no rounding error (12 bits times 12 in float), and what
// the roundings of x^2, a and b left over is small enough to be added as one correction.
template <typename T, bool kExactTail, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE Exponent<V> split_tanh(V x) {
  using C = Constants<Lane<V>>;
  if constexpr (kExactTail && kIsExact<T>) {
    const V rounder = splat<V>(C::kSquareRounder);
    const V square = fma(x, x, rounder) - rounder;
    const V w = fma(square, splat<V>(-C::kTanh3), splat<V>(-C::kTanh1));
    const V constants = fma(square, splat<V>(-C::kTanh3Rest), splat<V>(-C::kTanh1Rest));
    const V rest = fma(fma(x, x, -square), splat<V>(-(C::kTanh3 + C::kTanh3Rest)), constants);
    Exponent<V> t = split_product<T>(x, w);
    t.fraction = fma(x, rest, t.fraction);
    return t;
  } else {
    constexpr Lane<V> a = C::kTanh1 + C::kTanh1Rest, b = C::kTanh3 + C::kTanh3Rest;
    return split_product<T>(x, fma(x * x, splat<V>(-b), splat<V>(-a)));
  }
}

// 1/value: 2^-14 is 1/32 of half an ulp of bfloat16, the 2^-22 of a GPU 1/1000 of one of half.
template <typename T, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V reciprocal_for(V value) {
  if constexpr (kSame<T, bfloat16> || kIsUnsplit<T, V>)
    return rough_reciprocal(value);
  else
    return reciprocal(value);
}

template <typename T, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V exp2_of(Exponent<V> t) {
  if constexpr (kIsUnsplit<T, V>)
    return exp2_instruction_all(t.fraction);
  else
    return scale(Fit<T>::exp2(t.fraction, 1), t.whole);
}

// 2^t kUp or 2^t kDown, where that is a normal number or 0.
template <typename T, bool kIsUp, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V exp2_scaled(Exponent<V> t) {
  using C = Constants<Lane<V>>;
  constexpr int kShift = kIsUp ? C::kUpLog2 : -C::kUpLog2;
  if constexpr (kIsUnsplit<T, V>) {
    return exp2_instruction(t.fraction + kShift);
  } else if constexpr (kHasSpecialUnit) {
    V power;
    if constexpr (kSame<V, float>)
      power = exp2_instruction(t.fraction);
    else
      power = Fit<T>::exp2(t.fraction, 1);
    return power * exp2_integer<kShift>(t.whole);
  } else {
    return scale(Fit<T>::exp2(t.fraction, kIsUp ? C::kUp : C::kDown), t.whole);
  }
}

// 1/(1 + e) for e = 2^t, with room for t far beyond the range of a lane: everything is scaled by
// kDown, so that e does not overflow where 1/e is denormal. sigmoid = inverse * kDown, and
// 1 - sigmoid = exp * inverse; neither cancels.
template <typename V>
struct Logistic {
  V exp, inverse;
};

template <typename T, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE Logistic<V> logistic(Exponent<V> t) {
  constexpr Lane<V> kDown = Constants<Lane<V>>::kDown;
  const V exp = exp2_scaled<T, false>(t);
  const V sum = exp + splat<V>(kDown);
  return {exp, reciprocal_for<T>(sum)};
}

// x sigmoid(v) = max(x, 0) - z e/(1 + e) for an odd v, with z = |x| and e = e^-v(z) = 2^t. Scaled
// by kUp, e is normal wherever the product is not 0; the product is rounded once, with the sum.
template <typename T, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V weigh(V x, V z, Exponent<V> t) {
  constexpr Lane<V> kUp = Constants<Lane<V>>::kUp;
  const V e = exp2_scaled<T, true>(t);
  return fma(-(z * e), reciprocal_for<T>(e + splat<V>(kUp)), max(x, splat<V>(-0.0f)));
}

// The derivative of x * sigmoid(v(x)): s (1 + x v' (1 - s)).
template <typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V weigh_slope(V x_slope, Logistic<V> l) {
  const V factor = fma(x_slope, l.exp * l.inverse, splat<V>(1));
  return l.inverse * factor * Constants<Lane<V>>::kDown;
}

// Phi(-z) for z >= 0 as exp * ratio: e^(-z^2/2) and what is left, which is smooth. On a GPU, which
// has no instruction to scale with, exp has the factor kUp that keeps it normal, the ratio 1/kUp.
template <typename V>
struct NormalTail {
  V exp, ratio;
};
template <typename V>
inline constexpr Lane<V> kTailUp = kHasSpecialUnit ? Constants<Lane<V>>::kUp : Lane<V>(1);

template <typename T, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE NormalTail<V> normal_tail(V z) {
  using C = Constants<Lane<V>>;
  const auto t = split_square<T>(z, C::kLog2e / 2, C::kLog2eRest / 2);
  V exp;
  if constexpr (kHasSpecialUnit)
    exp = exp2_scaled<T, true>(t);
  else
    exp = exp2_of<T>(t);
  const Quotient<V> g = Fit<T>::tail(z, z * z, kTailUp<V>);
  return {exp, g.p * reciprocal_for<T>(g.q)};
}

}  // namespace detail

// e^x.
template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V exp(V x) {
  using S = detail::Storage<T, V>;
  using C = detail::Constants<Lane<V>>;
  x = min(max(x, splat<V>(C::kExpLow)), splat<V>(C::kExpHigh));
  return detail::exp2_of<S>(detail::split_multiple<S>(x, C::kLog2e, C::kLog2eRest));
}

// 2^x.
template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V exp2(V x) {
  using C = detail::Constants<Lane<V>>;
  x = min(max(x, splat<V>(C::kExp2Low)), splat<V>(C::kExp2High));
  using S = detail::Storage<T, V>;
  return detail::exp2_of<S>(detail::split_product<S>(x, splat<V>(1)));
}

// 1/(1 + e^-x).
template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V sigmoid(V x) {
  using S = detail::Storage<T, V>;
  using C = detail::Constants<Lane<V>>;
  x = min(max(x, splat<V>(C::kSigmoidLow)), splat<V>(C::kSigmoidHigh));
  const auto l = detail::logistic<S>(detail::split_multiple<S>(x, -C::kLog2e, -C::kLog2eRest));
  return l.inverse * C::kDown;
}

// sigmoid'(x) = e/(1 + e)^2 with e = e^-|x|: no 1 - s, which has lost all bits beyond |x| = 17.
template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V d_sigmoid(V x) {
  using S = detail::Storage<T, V>;
  using C = detail::Constants<Lane<V>>;
  const V z = min(abs(x), splat<V>(-C::kExpLow));
  const V e = detail::exp2_of<S>(detail::split_multiple<S>(z, -C::kLog2e, -C::kLog2eRest));
  const V sum = e + splat<V>(1);
  if constexpr (detail::kIsUnsplit<S, V>)
    return e * rough_reciprocal(sum * sum);
  else
    return e * reciprocal(sum * sum);
}

// sigmoid''(x) = -sign(x) e (1 - e)/(1 + e)^3. 1 - e = 1 - 2^n - 2^n (2^f - 1) keeps its relative
// accuracy near x = 0, where n = 0 and 2^f - 1 = f * polynomial.
template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V d2_sigmoid(V x) {
  using S = detail::Storage<T, V>;
  using C = detail::Constants<Lane<V>>;
  const V z = min(abs(x), splat<V>(-C::kExpLow));
  if constexpr (detail::kIsUnsplit<S, V>) {
    const V t = z * -C::kLog2e;
    const V e = exp2_instruction_all(t);
    const V slope = detail::Fit<float>::exp2_slope(t);
    const V one_minus_e = select(t > splat<V>(-0.5f), -t * slope, 1 - e);
    const V sum = e + 1;
    const V magnitude = e * (one_minus_e * rough_reciprocal(sum * sum * sum));
    return select(x > V{}, -magnitude, magnitude);
  }
  const auto t = detail::split_multiple<Lane<V>>(z, -C::kLog2e, -C::kLog2eRest);
  const V minus_one = t.fraction * detail::Fit<Lane<V>>::exp2_slope(t.fraction);
  const V one = splat<V>(1);
  const V power = scale(one, t.whole);
  const V e = scale(minus_one + one, t.whole);
  const V one_minus_e = fma(-power, minus_one, one - power);
  const V sum = e + one;
  const V magnitude = e * (one_minus_e * reciprocal(sum * sum * sum));
  return select(x > V{}, -magnitude, magnitude);
}

// tanh(x) = sign(x) (1 - e)/(1 + e) with e = e^-2|x|, and 1 - e as in d2_sigmoid.
template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V tanh(V x) {
  using S = detail::Storage<T, V>;
  using C = detail::Constants<Lane<V>>;
  const V one = splat<V>(1);
  const V z = min(abs(x), splat<V>(-C::kExpLow / 2));
  V e, one_minus_e;
  if constexpr (detail::kIsUnsplit<S, V>) {
    const V t = z * (-2 * C::kLog2e);
    e = exp2_instruction_all(t);
    one_minus_e = select(t > splat<V>(-0.5f), -t * detail::Fit<float>::exp2_slope(t), one - e);
  } else {
    const auto t = detail::split_multiple<Lane<V>>(z, -2 * C::kLog2e, -2 * C::kLog2eRest);
    const V minus_one = t.fraction * detail::Fit<Lane<V>>::exp2_slope(t.fraction);
    const V power = scale(one, t.whole);
    e = scale(minus_one + one, t.whole);
    one_minus_e = fma(-power, minus_one, one - power);
  }
  const V magnitude = one_minus_e * detail::reciprocal_for<S>(e + one);
  using Bits = typename detail::BitsOf<V>::type;
  const Bits sign = bit_cast<Bits>(x) & bit_cast<Bits>(splat<V>(-0.0f));
  return bit_cast<V>(bit_cast<Bits>(magnitude) | sign);
}

// The normal distribution: the integral of e^(-t^2/2)/sqrt(2 pi) from -inf to x.
template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V normal_cdf(V x) {
  using S = detail::Storage<T, V>;
  const V z = min(abs(x), splat<V>(detail::Constants<Lane<V>>::kNormalHigh));
  const auto tail = detail::normal_tail<S>(z);
  return select(x < V{}, tail.exp * tail.ratio, fma(-tail.exp, tail.ratio, splat<V>(1)));
}

// Its derivative e^(-x^2/2)/sqrt(2 pi).
template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V normal_pdf(V x) {
  using S = detail::Storage<T, V>;
  using C = detail::Constants<Lane<V>>;
  const V z = min(abs(x), splat<V>(C::kNormalHigh));
  return detail::exp2_of<S>(detail::split_square<S>(z, C::kLog2e / 2, C::kLog2eRest / 2)) *
         Lane<V>(detail::kInverseSqrtTwoPi);
}

// erfc(x) = 2 Phi(-sqrt(2) x); the exponential takes x itself, so the product is not rounded there.
template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V erfc(V x) {
  using S = detail::Storage<T, V>;
  using C = detail::Constants<Lane<V>>;
  const V z = min(abs(x), splat<V>(C::kErfcHigh));
  const V exp = detail::exp2_of<S>(detail::split_square<S>(z, C::kLog2e, C::kLog2eRest));
  const V scaled = z * Lane<V>(detail::kSqrtTwo);
  const auto g = detail::Fit<S>::tail(scaled, scaled * scaled);
  const V ratio = g.p * reciprocal(g.q) * Lane<V>(2);
  return select(x < V{}, fma(-exp, ratio, splat<V>(2)), exp * ratio);
}

// erfc'(x) = -2/sqrt(pi) e^(-x^2).
template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V d_erfc(V x) {
  using S = detail::Storage<T, V>;
  using C = detail::Constants<Lane<V>>;
  const V z = min(abs(x), splat<V>(C::kErfcHigh));
  return detail::exp2_of<S>(detail::split_square<S>(z, C::kLog2e, C::kLog2eRest)) *
         Lane<V>(-detail::kTwoOverSqrtPi);
}

// x Phi(x) = max(x, 0) - |x| Phi(-|x|) on both sides of 0; above 0 the second term is at most half
// of the first.
template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V gelu_none(V x) {
  using S = detail::Storage<T, V>;
  const V z = min_abs(x, splat<V>(detail::Constants<Lane<V>>::kNormalHigh));
  const auto tail = detail::normal_tail<S>(z);
  // Where the ratio has the factor 1/kUp, z * ratio would lose what a denormal z has.
  if constexpr (kHasSpecialUnit) {
    return fma(-(tail.exp * z), tail.ratio, max(x, splat<V>(-0.0f)));
  }
  return fma(-tail.exp, z * tail.ratio, max(x, splat<V>(-0.0f)));
}

// Phi(x) + x phi(x) = E h below 0 and 1 - E h above, with h = P/Q - |x|/sqrt(2 pi).
template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V d_gelu_none(V x) {
  using S = detail::Storage<T, V>;
  const V z = min(abs(x), splat<V>(detail::Constants<Lane<V>>::kNormalHigh));
  const auto tail = detail::normal_tail<S>(z);
  constexpr Lane<V> k = Lane<V>(detail::kInverseSqrtTwoPi) / detail::kTailUp<V>;
  const V h = fma(z, splat<V>(-k), tail.ratio);
  return select(x < V{}, tail.exp * h, fma(-tail.exp, h, splat<V>(1)));
}

// x (1 + tanh u)/2 = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3). Without kExactTail, 2u is
// rounded to a lane, which costs up to |2u| ulp of the result.
template <typename T = void, bool kExactTail = true, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V gelu_tanh(V x) {
  using S = detail::Storage<T, V>;
  using C = detail::Constants<Lane<V>>;
  if constexpr (detail::kIsUnsplit<S, V>) {
    x = max(x, splat<V>(C::kTanhLow));
    return x * (detail::logistic<S>(detail::split_tanh<S, false>(x)).inverse * C::kDown);
  }
  const V z = min_abs(x, splat<V>(-C::kTanhLow));
  return detail::weigh<S>(x, z, detail::split_tanh<S, kExactTail>(z));
}

template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V d_gelu_tanh(V x) {
  using S = detail::Storage<T, V>;
  using C = detail::Constants<Lane<V>>;
  x = min(max(x, splat<V>(C::kTanhLow)), splat<V>(C::kTanhHigh));
  constexpr Lane<V> k1 = Lane<V>(detail::kTwiceSqrtTwoOverPi);
  constexpr Lane<V> k3 = Lane<V>(3 * 0.044715 * detail::kTwiceSqrtTwoOverPi);
  const V slope = x * fma(x * x, splat<V>(k3), splat<V>(k1));  // x d(2u)/dx
  return detail::weigh_slope(slope, detail::logistic<S>(detail::split_tanh<S, false>(x)));
}

// x sigmoid(1.702 x).
template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V gelu_quick(V x) {
  using S = detail::Storage<T, V>;
  using C = detail::Constants<Lane<V>>;
  if constexpr (detail::kIsUnsplit<S, V>) {
    x = max(x, splat<V>(C::kQuickLow));
    const auto t = detail::split_multiple<S>(x, -C::kQuick, 0);
    return x * (detail::logistic<S>(t).inverse * C::kDown);
  }
  const V z = min_abs(x, splat<V>(-C::kQuickLow));
  return detail::weigh<S>(x, z, detail::split_multiple<S>(z, -C::kQuick, -C::kQuickRest));
}

template <typename T = void, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V d_gelu_quick(V x) {
  using S = detail::Storage<T, V>;
  using C = detail::Constants<Lane<V>>;
  x = min(max(x, splat<V>(C::kQuickLow)), splat<V>(C::kQuickHigh));
  const auto t = detail::split_multiple<S>(x, -C::kQuick, -C::kQuickRest);
  return detail::weigh_slope(x * Lane<V>(1.702), detail::logistic<S>(t));
}

}  // namespace opwright
