"""Names that are taken, by C++ or by PyTorch, and names and strings in generated C++."""

# Keywords of C++20 and the other spellings of its signs, such as `bitand` for `&`.
CPP_KEYWORDS = frozenset(
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t char8_t class "
    "co_await co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype "
    "default delete do double dynamic_cast else enum explicit export extern false float for friend goto if inline int "
    "long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register "
    "reinterpret_cast requires return short signed sizeof static static_assert static_cast struct switch template this "
    "thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor "
    "xor_eq".split()
)

# Namespaces in which a version of PyTorch from 2.12 to 2.14 registers operators of its own; torch.compile and others
# treat all of a namespace alike.
PYTORCH_NAMESPACES = frozenset(
    "aten prim prims inductor_prims rngprims debugprims quantized _quantized quantized_decomposed quantization c10d "
    "c10d_functional _c10d_functional _c10d_functional_autograd symm_mem fsdp _dtensor inductor export onnx "
    "onnx_symbolic mkl mkldnn mkldnn_prepacked onednn sparse static_runtime profiler streams triton cuda ao _native "
    "flex_lib debug_mode_ops coor mempool prepacked _test _inductor_test".split()
)


def cpp_name(name: str) -> str:
    """Returns the name of an argument in a kernel: itself, unless it means something else there."""
    return f"{name}_" if name in CPP_KEYWORDS or name in ("T", "stream") else name


def quote_for_c(text: str) -> str:
    """Returns a text as a string of C."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
