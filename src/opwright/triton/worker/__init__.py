"""The worker: describes a Triton JIT function and compiles one key of it, in any Python with Triton 3.5 or later.

It runs as a process of its own (`main`), in whatever virtual environment holds Triton, or inside a Python
host (`handle`). It therefore imports nothing but the standard library and, once a request needs it, Triton; and it
names its own modules relatively, since it is `worker` there and `opwright.triton.worker` here.
"""

from .errors import WorkerError
from .protocol import handle, main

__all__ = ["WorkerError", "handle", "main"]
