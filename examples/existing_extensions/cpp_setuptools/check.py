"""Compares matmul_cpp with torch.mm: sizes, strides, dtypes, gradients."""

import torch

# m, k, n. The last two need several blocks and slices.
SIZES = [(1, 1, 1), (17, 33, 65), (0, 3, 4), (3, 0, 4), (3, 4, 0), (200, 300, 500), (385, 193, 129)]


def layouts(matrix):
    """Yields the matrix stored by rows, by columns and with gaps, and its first row repeated."""
    m, n = matrix.shape
    yield matrix
    yield matrix.mT.contiguous().mT
    yield matrix.new_zeros(2 * m, 3 * n)[::2, 1::3].copy_(matrix)
    yield matrix[:1].expand(m, n)


def check_products(matmul, dtype):
    """Allows an element the error that a sum of k products may have: k roundings of the sum of magnitudes."""
    count = 0
    for m, k, n in SIZES:
        for a in layouts(torch.randn(m, k, dtype=dtype)):
            for b in layouts(torch.randn(k, n, dtype=dtype)):
                got = matmul(a, b)
                wanted = torch.mm(a.double(), b.double())
                allowed = torch.finfo(dtype).eps * (k + 1) * torch.mm(a.abs().double(), b.abs().double())
                assert got.shape == (m, n), got.shape
                assert got.dtype == dtype
                assert ((got.double() - wanted).abs() <= allowed).all(), (m, k, n)
                count += 1
    return count


def check():
    from matmul_cpp import matmul

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        print(f"{dtype}: {check_products(matmul, dtype)} products as torch.mm")
    a = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 7, dtype=torch.float64).mT.requires_grad_()
    print("gradcheck:", torch.autograd.gradcheck(matmul, (a, b)))
    print("gradgradcheck:", torch.autograd.gradgradcheck(matmul, (a, b)))
    try:
        matmul(a, a)
    except ValueError as error:
        print("refused:", str(error).splitlines()[0])


if __name__ == "__main__":
    check()
