import torch

import opwright


def naive(x):  # overflows beyond 88
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def stable(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def reference(x):
    return torch.softmax(x, -1)


if __name__ == "__main__":
    samples = [(torch.randn(16, 33),), (100 * torch.randn(4, 1000),)]
    for function in (naive, stable):
        record = opwright.verify(function, reference=reference, samples=samples, checks=["numerics"])
        print(f"{function.__name__}: {'right' if record.passed else 'wrong'}")
    print(opwright.verify(naive, reference=reference, samples=samples, checks=["numerics"]).failures[0].check)
