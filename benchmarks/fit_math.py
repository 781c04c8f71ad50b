"""Fits every coefficient table of opwright/math_tables.h and prints it as C++.

Usage: python benchmarks/fit_math.py   (needs mpmath; about five seconds)

Two functions are approximated, both by the exchange algorithm of Remez for the relative error, in
50 digits:
  exp2  2^f on [-1/2, 1/2] by a polynomial;
  tail  g(z) = exp(z^2/2) * Phi(-z) by P(z)/Q(z), where Phi is the normal distribution. g is smooth
        and falls from 1/2 like 1/(z sqrt(2 pi)), so one quotient serves from 0 to where
        exp(-z^2/2) is no longer representable. All coefficients come out positive: Horner's rule
        does not cancel.
The constants of the exponents are printed too, split into a head and a tail.
"""

from mpmath import erfc, exp, fabs, log, lu_solve, matrix, mp, mpf, nstr, pi, sqrt

mp.dps = 50


def tail(z):
    return exp(z * z / 2) * erfc(z / sqrt(2)) / 2


def evaluate(coefficients, x):
    value = mpf(0)
    for c in reversed(coefficients):
        value = value * x + c
    return value


def alternating_extrema(wrong, count):
    """Indices of `count` extrema of alternating sign; fewer when the error has fewer."""
    extrema = []
    for i, w in enumerate(wrong):
        if extrema and (w > 0) == (wrong[extrema[-1]] > 0):
            if fabs(w) > fabs(wrong[extrema[-1]]):
                extrema[-1] = i
        else:
            extrema.append(i)
    while len(extrema) > count:
        extrema.remove(min(extrema[0], extrema[-1], key=lambda i: fabs(wrong[i])))
    return extrema


def remez(function, grid, degree_p, degree_q, rounds=12):
    """Minimax P/Q for the relative error on a fine grid; returns (P, Q, error), with Q[0] = 1.

    The grid is dense at its ends like the extrema of a Chebyshev polynomial. The first quotient
    interpolates at the zeros of one; from then on the extrema of its error are exchanged.
    """
    values = [function(x) for x in grid]
    count = degree_p + degree_q + 2

    def solve(nodes, q, error):
        """One Newton step of P = y Q (1 + sign error) at the nodes, for P, Q and the error."""
        levelled = len(nodes) == count
        size = len(nodes)
        a, b = matrix(size, size), matrix(size, 1)
        for i, node in enumerate(nodes):
            x, y, sign = grid[node], values[node], (-1) ** i if levelled else 0
            for j in range(degree_p + 1):
                a[i, j] = x**j / y
            for j in range(1, degree_q + 1):
                a[i, degree_p + j] = -(x**j) * (1 + sign * error)
            b[i] = 1 + sign * error
            if levelled:
                a[i, size - 1] = -sign * evaluate(q, x)
                b[i] += a[i, size - 1] * error
        c = lu_solve(a, b)
        p = [c[j] for j in range(degree_p + 1)]
        q = [mpf(1)] + [c[degree_p + j] for j in range(1, degree_q + 1)]
        return p, q, c[size - 1] if levelled else mpf(0)

    def errors(p, q):
        return [evaluate(p, x) / (evaluate(q, x) * y) - 1 for x, y in zip(grid, values)]

    last = len(grid) - 1
    zeros = [round(last * (2 * i + 1) / (2 * count - 2)) for i in range(count - 1)]
    p, q, error = solve(zeros, [mpf(1)], mpf(0))
    for _ in range(rounds):
        wrong = errors(p, q)
        nodes = alternating_extrema(wrong, count)
        if max(map(fabs, wrong)) < fabs(error) * mpf("1.001") or len(nodes) < count:
            break
        for _ in range(4):
            p, q, error = solve(nodes, q, error)
    return p, q, max(map(fabs, errors(p, q)))


def show(name, scalar, values, worst):
    digits, suffix = (9, "f") if scalar == "float" else (17, "")
    numbers = [nstr(v, digits, min_fixed=0, max_fixed=0) + suffix for v in values]
    print(f"// {name}: relative error {nstr(worst, 2)}")
    print("{" + ", ".join(numbers) + "}")


def split(value, bits):
    """The value rounded to `bits` bits, and the rest."""
    scale = mpf(2) ** (bits - 1 - int(mp.floor(mp.log(fabs(value), 2))))
    head = mp.nint(value * scale) / scale
    return head, value - head


def main():
    chebyshev = [-mp.cos(pi * i / 1200) for i in range(1201)]
    for name, scalar, degree in [
        ("exp2 of Fit<float>", "float", 6),
        ("exp2 of Fit<double>", "double", 11),
        ("exp2 of Fit<half>", "float", 4),
        ("exp2 of Fit<bfloat16>", "float", 3),
    ]:
        p, _, worst = remez(lambda f: mpf(2) ** f, [x / 2 for x in chebyshev], degree, 0)
        show(name, scalar, p, worst)
    for name, scalar, degrees, end in [
        ("tail of Fit<float>", "float", (4, 5), 14.75),
        ("tail of Fit<double>", "double", (10, 11), 39),
        ("tail of Fit<half>", "float", (2, 3), 6),
        ("tail of Fit<bfloat16>", "float", (2, 3), 14.75),
    ]:
        # z = 3 (1 + s)/(1 - s) spreads the bend of g near 0 evenly over s.
        top = mpf(end - 3) / (end + 3)
        grid = [3 * (1 + s) / (1 - s) for s in ((x + 1) / 2 * (top + 1) - 1 for x in chebyshev)]
        p, q, worst = remez(tail, grid, *degrees)
        show(f"P, {name}", scalar, p, worst)
        show(f"Q, {name}", scalar, q, worst)
    log2e = 1 / log(2)
    slope = 2 * sqrt(2 / pi)
    for name, value, head_bits in [
        ("log2(e)", log2e, (24, 53)),
        ("log2(e)/2", log2e / 2, (24, 53)),
        ("1.702 log2(e)", mpf("1.702") * log2e, (24, 53)),
        ("2 sqrt(2/pi) log2(e)", slope * log2e, (22, 49)),
        ("2 sqrt(2/pi) 0.044715 log2(e)", slope * mpf("0.044715") * log2e, (24, 53)),
    ]:
        for bits in head_bits:
            head, rest = split(value, bits)
            print(f"// {name}, {bits} bits: {nstr(head, 20)} + {nstr(rest, 17)}")


if __name__ == "__main__":
    main()
