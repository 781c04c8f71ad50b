"""Names that generated C++ cannot give to a variable or an enumerator."""

CPP_KEYWORDS = frozenset(
    "alignas alignof and asm auto bool break case catch char class const continue default delete do "
    "double else enum explicit export extern false float for friend goto if inline int long mutable "
    "namespace new not operator or private protected public register return short signed sizeof "
    "static struct switch template this throw true try typedef typename union unsigned using virtual "
    "void volatile while xor".split()
)
