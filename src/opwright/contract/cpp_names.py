"""Words of generated C++: names that it cannot give to a variable or an enumerator, and strings."""

CPP_KEYWORDS = frozenset(
    "alignas alignof and asm auto bool break case catch char class const continue default delete do "
    "double else enum explicit export extern false float for friend goto if inline int long mutable "
    "namespace new not operator or private protected public register return short signed sizeof "
    "static struct switch template this throw true try typedef typename union unsigned using virtual "
    "void volatile while xor".split()
)


def quote_for_c(text: str) -> str:
    """Returns a text as a string of C."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
