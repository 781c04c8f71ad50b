"""Checks the wording of what people read; `make lint` runs it, and `python tests/prose.py FILE...` checks some files.

It reads the tracked Markdown files, decision records excepted, and the strings and comments of src and ops/src.
"""

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

MAX_WORDS = 40  # in a sentence of Markdown; a code span is one word
_BE = r"\b(?:is|are|was|were|be|been)"
# "There is no X" and "is no faster than" are plain English; "X is no Y" is not.
ALLOWED = (
    rf"\b(?:there|such) (?:(?:would|will|may|must|can|has) )?{_BE} no\b"
    rf"|{_BE} no (?:longer|more|less|fewer|better|worse|newer|older|faster|slower|larger|smaller|greater|wider|later)\b"
)
_PROGRAM = r"\b(?:it|compiler|gcc|g\+\+|clang|nvcc|ninja|torch|PyTorch|Triton|Opwright|verify|bench|kernel)"
RULES = [
    (rf"{_BE} no (?:[`{{\w]+|$)", 'write "is not a" or "invalid"'),
    (r"\baccus(?:e|ed|es|ing)\b", 'name the finding, or write "reported"'),
    (r"\bwithout a word\b", 'write "with no output"'),
    (r"\b(?:its|their) own mistakes?\b", "name the error"),
    (r"\b(?:lose|loses|losing|lost|out of) patience\b", 'write "timed out"'),
    (rf"{_PROGRAM} (?:believes?|thinks?|suspects?|complains?)\b", "a program is not a person"),
    (rf"{_BE} left out\b", 'write "skipped", "omitted" or "optional"'),
]


def tracked():
    command = ["git", "ls-files", "*.md", "src/*.py", "ops/src/*.py"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if not name.startswith("docs/decisions/")]


def check(path):
    """Yields `file:line: message` for each finding."""
    text = path.read_text(encoding="utf-8")
    is_markdown = path.suffix == ".md"
    for line, passage in markdown_passages(text) if is_markdown else python_passages(text):
        judged = re.sub(_wrapped(ALLOWED), lambda found: re.sub(r"\S", "_", found[0]), passage)
        for pattern, remedy in RULES:
            for found in re.finditer(_wrapped(pattern), judged):
                at = line + passage.count("\n", 0, found.start())
                yield f"{path}:{at}: `{' '.join(found[0].split())}`: {remedy}"
        for sentence in re.finditer(r"\S.*?(?:[.!?](?=[\s)*])|$)", passage, re.DOTALL) if is_markdown else ():
            words = len(re.findall(r"`[^`]+`|[^\W_][^\s`]*", sentence[0]))
            if words > MAX_WORDS:
                at = line + passage.count("\n", 0, sentence.start())
                yield f"{path}:{at}: {words} words in a sentence, at most {MAX_WORDS}: {sentence[0][:40]!r}"


def _wrapped(pattern):
    return "(?i)" + pattern.replace(" ", r"\s+")


def markdown_passages(text):
    """Yields line and text of paragraphs, headings, and the parts of list items, table rows and lists of links."""
    text = re.sub(r"(?ms)^ *(```+).*?^ *\1 *$", lambda block: "\n" * block[0].count("\n"), text)
    for block in re.finditer(r"(?ms)^ *#[^\n]*|^ *\S.*?(?=\n *(?:[-*#|]|\d+\.) |\n\s*\n|\Z)", text):
        has_parts = re.match(r" *(?:[-*|]|\d+\.) |.* · ", block[0])
        parts = r"(?:(?!; |(?<!\\)\| | · ).)+" if has_parts else ".+"
        for part in re.finditer(parts, block[0], re.DOTALL):
            yield 1 + text.count("\n", 0, block.start() + part.start()), part[0]


def python_passages(text):
    """Yields line and text of string literals and of lines of comments."""
    kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            yield token.start[0], token.string


if __name__ == "__main__":
    findings = [each for name in sys.argv[1:] or tracked() for each in check(Path(name))]
    print("\n".join(findings) or "prose: no findings")
    sys.exit(1 if findings else 0)
