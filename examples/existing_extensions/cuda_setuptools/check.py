"""Compares matmul_cuda with torch.mm: sizes, strides, dtypes, gradients, streams."""

import torch

# m, k, n. The last has enough tiles for the kernel of large tiles.
SIZES = [(1, 1, 1), (17, 33, 65), (0, 3, 4), (3, 0, 4), (3, 4, 0), (200, 300, 500), (2500, 100, 1900)]


def layouts(matrix):
    """Yields the matrix stored by rows, by columns and with gaps, and its first row repeated."""
    m, n = matrix.shape
    yield matrix
    yield matrix.mT.contiguous().mT
    yield matrix.new_zeros(2 * m, 3 * n)[::2, 1::3].copy_(matrix)
    yield matrix[:1].expand(m, n)


def check_products(matmul, dtype):
    """Allows k roundings of the sum of magnitudes where sums are kept, and the rounding of the result."""
    sums = torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps
    count = 0
    for m, k, n in SIZES:
        for a in layouts(torch.randn(m, k, dtype=torch.float64, device="cuda").to(dtype)):
            for b in layouts(torch.randn(k, n, dtype=torch.float64, device="cuda").to(dtype)):
                got = matmul(a, b)
                wanted = torch.mm(a.double(), b.double())
                allowed = sums * (k + 1) * torch.mm(a.abs().double(), b.abs().double())
                allowed += torch.finfo(dtype).eps * wanted.abs() + torch.finfo(dtype).smallest_normal
                assert got.shape == (m, n), got.shape
                assert got.dtype == dtype
                assert ((got.double() - wanted).abs() <= allowed).all(), (m, k, n)
                count += 1
    return count


def check_stream(matmul):
    """A product on a side stream waits for what that stream computes, and for nothing else."""
    stream = torch.cuda.Stream()
    a = torch.zeros(64, 64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        a.fill_(1)
        product = matmul(a, a)
    assert not stream.query(), "the stream was idle: nothing was tried"
    stream.synchronize()
    return bool((product == 64).all())


def check():
    from matmul_cuda import matmul

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        print(f"{dtype}: {check_products(matmul, dtype)} products as torch.mm")
    a = torch.randn(5, 7, dtype=torch.float64, device="cuda", requires_grad=True)
    b = torch.randn(3, 7, dtype=torch.float64, device="cuda").mT.requires_grad_()
    print("gradcheck:", torch.autograd.gradcheck(matmul, (a, b)))
    print("gradgradcheck:", torch.autograd.gradgradcheck(matmul, (a, b)))
    print("side stream:", check_stream(matmul))
    try:
        matmul(a, a)
    except ValueError as error:
        print("refused:", str(error).splitlines()[0])


if __name__ == "__main__":
    if torch.cuda.is_available():
        check()
    else:
        print("skipped: there is no GPU, or this torch has no CUDA")
