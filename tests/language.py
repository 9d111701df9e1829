"""The lint of language: plain words in docs, help texts and public docstrings, short sentences and first lines.

`make lint` runs it. Code spans and quotations are not checked, and no words of a sentence. Other comments and tests
still have old words: their number may only shrink.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST_LINE_MAX = 100
SENTENCE_WORDS_MAX = 25
OLD_LINES_MAX = 160  # may only shrink

# A pattern, and the words to write instead.
WORDS = (
    (r"\btold\b", "notified, reported or knows"),
    (r"\blook(s|ed|ing)? at\b", "reads, checks or compares"),
    (r"\b(stands?|stood|standing)\b", "is, replaces, means or prevents"),
    (r"\bbesides?\b", "next to, compared with or in addition to"),
    (r"\banew\b", "again"),
    (r"\b(go|goes|going|went|gone) on\b", "continues"),
    (r"\bfor good\b", "permanently"),
    (r"\b(some|any)body\b|\bwhoever\b", "the name of the actor: the broker, the consumer, the operator"),
)
OPENING = (
    r"(^|(?<=[.:] )|(?<=\*\*))(Who|What|Whom)\b(?! (is|does|are|do|to|if|happens|it is)\b)[^?]*$",
    "a sentence with a noun as its subject",
)
RULES = tuple((re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in WORDS)
STRICT = (*RULES, (re.compile(OPENING[0]), OPENING[1]))
OLD = re.compile("|".join(pattern for pattern, _ in WORDS))
SENTENCE_END = re.compile(r"(?<=[.!?])[)*]* (?=[^a-z\s])")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
BLOCK_START = re.compile(r"[-*] |\d+\. |#|\|")
HELPS = ("help", "epilog", "short_help", "doc", "hint")
UNCHECKED = re.compile(r'`[^`]*`|"[^"]*"')

Line = tuple[str, int, str]  # file, number, text
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def faults(text: str) -> Iterator[str]:
    """Yield the advice for each old word of a line."""
    bare = UNCHECKED.sub("…", text)
    for pattern, advice in STRICT:
        if found := pattern.search(bare):
            yield f"'{found[0][:40]}': write {advice}"


def pages() -> Iterator[Line]:
    """Yield the lines of all Markdown pages; those of blocks of code are empty."""
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
        *ROOT.glob("docs/**/*.md"),
    ):
        code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            fence = line.lstrip().startswith("```")
            code ^= fence
            yield path.relative_to(ROOT).as_posix(), number, "" if code or fence else line


def paragraphs(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield paragraphs, items of lists and cells of tables, as one line each; a semicolon ends an item in a cell."""
    held: Line = ("", 0, "")
    for name, number, line in (*lines, ("", 0, "")):
        text = line.strip()
        if held[2] and (name != held[0] or not text or BLOCK_START.match(text)):
            yield held
            held = ("", 0, "")
        if text.startswith("|"):
            yield from ((name, number, item) for item in re.split(r"\||; ", text))
        elif text and not text.startswith("#"):
            held = (name, held[1] or number, f"{held[2]} {text}")


def long_sentences(lines: Iterable[Line]) -> Iterator[str]:
    """Yield the faults of sentences with too many words. Code and quotations are no words."""
    for name, number, text in paragraphs(lines):
        for sentence in SENTENCE_END.split(UNCHECKED.sub("…", text)):
            words = [word for word in LINK.sub(r"\1", sentence).split() if re.search(r"\w", word)]
            if len(words) > SENTENCE_WORDS_MAX:
                start = " ".join(words[:6])
                yield f"{name}:{number}: sentence of {len(words)} words, at most {SENTENCE_WORDS_MAX}: '{start} …'"


def public_modules(trees: dict[str, ast.Module]) -> set[str]:
    """Return the files of memq that define a name of `memq`, `memq.aio` or `memq.testing`, and of every error."""
    found = {"memq/__init__.py", "memq/aio.py", "memq/errors.py", "memq/testing/__init__.py"}
    for face in sorted(found):
        for node in ast.walk(trees[face]):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("memq."):
                found.add(node.module.replace(".", "/") + ".py")
    return found & set(trees)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, list[str], bool, bool]]:
    """Yield line number, lines, whether it is public, and whether it is the help of a command."""
    waiting: list[tuple[ast.Module | Definition, bool]] = [(tree, True)]
    while waiting:
        node, public = waiting.pop()
        if text := ast.get_docstring(node):
            decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", [])]
            command = any(re.search(r"\b(command|group)\(", each) for each in decorators)
            yield node.body[0].lineno, text.splitlines(), public, command
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [each for each in node.body if isinstance(each, Definition)]
            waiting += [(each, public and not each.name.startswith("_")) for each in inner]


def helps(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the help texts of options, commands and settings, and the messages and hints of errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in HELPS:
            yield node.value.lineno, literal(node.value)
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("Error"):
            yield node.lineno, literal(node.args[0])


def literal(node: ast.expr) -> str:
    """Return the text of a string in source; its values are `…`."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


def code_faults() -> Iterator[str]:
    """Yield the faults of docstrings, help texts and error messages of memq."""
    paths = sorted(ROOT.glob("memq/**/*.py"))
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    public_files = public_modules(trees)
    for name, tree in trees.items():
        for number, text in helps(tree):
            yield from (f"{name}:{number}: text has {fault}" for fault in faults(text))
        for number, lines, public, command in docstrings(tree):
            if len(lines[0]) > FIRST_LINE_MAX:
                yield f"{name}:{number}: first line of {len(lines[0])} characters: at most {FIRST_LINE_MAX}"
            checked = lines if command or (public and name in public_files) else lines[:1]
            for place, line in enumerate(checked):
                yield from (f"{name}:{number + place}: docstring has {fault}" for fault in faults(line))


def old_lines() -> int:
    """Return how many lines of memq and its tests have an old word: comments, docstrings and messages."""
    count = 0
    for path in (*ROOT.glob("memq/**/*.py"), *ROOT.glob("tests/**/*.py")):
        text = path.read_text(encoding="utf-8")
        count += (
            0 if path == Path(__file__) else len({text.count("\n", 0, found.start()) for found in OLD.finditer(text)})
        )
    return count


def main() -> int:
    gc.disable()  # the trees of 450 files: collections took a third of the time
    lines = list(pages())
    found = [f"{name}:{number}: {fault}" for name, number, line in lines for fault in faults(line)]
    found += long_sentences(lines)
    found += code_faults()
    if (count := old_lines()) > OLD_LINES_MAX:
        found.append(f"{count} lines of code have words of tests/language.py, {OLD_LINES_MAX} may: {dict(WORDS)}")
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
