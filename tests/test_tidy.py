"""The rules of the house that no tool knows: sizes with a ratchet, names, docstrings, errors, no sleep in tests."""

from __future__ import annotations

import ast
import gc
import importlib
import pkgutil
import re
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import memq
from memq.errors import KINDS, MemqError, all_errors, kind_of
from memq.settings import BrokerSettings, ClientSettings
from memq.topic import TopicSettings
from tests.event_docs import documented, logged
from tests.simulation.planted_bugs import BUGS, plant

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("memq", "memq_localstack", "tests", "benchmarks", "examples")
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600
FOLDER_FILES_MAX = 15  # not counting __init__.py
PUBLIC_METHODS_MAX = 20

# What is over a bound, with its size as it is. A size here may only shrink, an entry only go.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
BROAD_CLASSES: dict[str, int] = {}

IMPURE = {"asyncio", "concurrent", "selectors", "socket", "sqlite3", "subprocess", "threading", "time", "uvloop"}
VAGUE_NAMES = ("utils", "util", "common", "commons", "helpers", "helper", "misc")


@cache
def files() -> tuple[Path, ...]:
    """Return every Python file of the project, sorted."""
    return tuple(sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes() -> tuple[tuple[str, ast.AST], ...]:
    """Return what the rules check: definitions and calls, each with its file."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Call)
    gc.disable()  # it would check a million nodes again and again, two thirds of the time
    try:
        return tuple(
            (name_of(path), node) for path in files() for node in ast.walk(tree_of(path)) if isinstance(node, kinds)
        )
    finally:
        gc.freeze()
        gc.enable()


def check_ratchet(found: dict[str, int], allowed: dict[str, int], what: str) -> None:
    grown = {name: size for name, size in found.items() if size > allowed.get(name, 0)}
    assert not grown, f"{what}: split these by sense: {grown}"
    shrunk = {name: size for name, size in allowed.items() if found.get(name, 0) < size}
    assert not shrunk, f"{what}: these are smaller now, lower or remove their entries: {shrunk}"


def test_each_folder_of_the_package_has_at_most_15_files() -> None:
    folders = Counter(path.parent for path in files() if name_of(path).startswith("memq/"))
    full = [f"{folder} {count}" for folder, count in folders.items() if count - 1 > FOLDER_FILES_MAX]
    assert not full, f"a folder with more files than one glance takes, not counting __init__.py: {full}"


def test_files_are_short() -> None:
    found = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files()}
    check_ratchet({name: size for name, size in found.items() if size > FILE_LINES_MAX}, LONG_FILES, "long files")


def test_functions_are_short() -> None:
    found = {
        f"{name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    long = {name: size for name, size in found.items() if size > FUNCTION_LINES_MAX}
    check_ratchet(long, LONG_FUNCTIONS, "long functions")


def test_classes_are_narrow() -> None:
    found: dict[str, int] = {}
    for name, node in nodes():
        if isinstance(node, ast.ClassDef) and not is_state_machine(node):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            found[f"{name}:{node.name}"] = sum(not method.name.startswith("_") for method in methods)
    broad = {name: size for name, size in found.items() if size > PUBLIC_METHODS_MAX}
    check_ratchet(broad, BROAD_CLASSES, "broad classes")


def is_state_machine(node: ast.ClassDef) -> bool:
    """Whether this is a Hypothesis machine: its methods are rules, one for each event."""
    return any(isinstance(base, ast.Name) and base.id == "RuleBasedStateMachine" for base in node.bases)


def test_no_module_imports_itself_over_others() -> None:
    """No circle of imports, also not of those for types alone."""
    modules = {
        name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in files()
        if name_of(path).startswith("memq/")
    }
    imports: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [alias.name for node in found if isinstance(node, ast.Import) for alias in node.names]
        for node in found:
            if isinstance(node, ast.ImportFrom) and node.module:
                parts = [f"{node.module}.{alias.name}" for alias in node.names]
                names += [part if part in modules else node.module for part in parts]
        known = {name for name in names if name in modules}
        run = known | {package for name in known for package in packages_of(name)}  # each runs before its modules
        imports[module] = run - packages_of(module) - {module}
    assert len(imports) > 100
    TopologicalSorter(imports).prepare()  # CycleError names the circle


def packages_of(module: str) -> set[str]:
    """Return the packages that a module lies in, at any depth."""
    parts = module.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def test_no_file_has_a_vague_name() -> None:
    vague = [name_of(path) for path in files() if path.stem in VAGUE_NAMES or path.parent.name in VAGUE_NAMES]
    assert not vague, f"say what they are: {vague}"


def test_every_folder_is_a_package() -> None:
    folders = {path.parent for path in files() if not name_of(path).startswith(("examples/", "tests/golden/"))}
    bare = sorted(name_of(folder) for folder in folders if not (folder / "__init__.py").exists())
    assert not bare, f"no __init__.py that says the folder's place: {bare}"


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_every_file_says_its_place(path: Path) -> None:
    docstring = ast.get_docstring(tree_of(path)) or ""
    first = docstring.split("\n\n")[0]
    assert first, f"{name_of(path)} has no docstring"
    assert len(first) <= 400, (
        f"the first paragraph of {name_of(path)} has {len(first)} characters: one sentence, please"
    )


def test_modules_documented_as_pure_are_pure() -> None:
    """A machine says "pure" in its docstring; then it has no loop, clock, thread or socket."""
    found = {}
    for path in files():
        docstring = ast.get_docstring(tree_of(path)) or ""
        if path.stem != "__init__" and name_of(path).startswith("memq/") and re.search(r"\b[Pp]ure\b", docstring):
            impure = sorted(imported(tree_of(path)) & IMPURE)
            if impure:
                found[name_of(path)] = impure
    assert not found, f"pure modules import what is not: {found}"


def imported(tree: ast.Module) -> set[str]:
    """Return the top names of all modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_every_error_has_one_kind_a_code_and_a_docstring() -> None:
    for module in pkgutil.walk_packages(memq.__path__, "memq."):
        if not module.name.startswith(("memq.spark", "memq.testing.plugin")) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    errors = all_errors()
    for error in errors:
        assert kind_of(error) in KINDS
        assert (error.__doc__ or "").strip(), f"{error.__name__} has no docstring"
        assert error.default_hint, f"{error.__name__} does not say what to do"
        assert "code" in vars(error), f"{error.__name__} has no code of its own"
    codes = [error.code for error in errors]
    assert sorted(codes) == sorted(set(codes)), "two errors share a code"
    assert set(MemqError.__subclasses__()) == set(KINDS), "an error outside the six kinds"


def test_each_test_name_begins_with_its_actor() -> None:
    """A reader of a failure learns from the name which part of memq does what."""
    found = [
        f"{name}:{node.lineno}"
        for name, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(r"test_(who|what|nobody)_", node.name)
    ]
    assert not found, f"name the actor: {found}"


def test_no_module_takes_helpers_from_a_test_module() -> None:
    """Helpers have modules of their own. Modules of the contract are imported as a whole, for other implementations."""
    found = [
        f"{name}:{node.lineno}"
        for name, node in nodes()
        if isinstance(node, ast.ImportFrom) and re.search(r"\.test_\w+$", node.module or "")
    ]
    assert not found, f"move the helpers to a module of their folder: {found}"


def test_each_class_of_the_package_has_a_name_of_its_own() -> None:
    """Two classes of one name are taken for each other in a trace, in a search, and by a reader."""
    places: dict[str, list[str]] = {}
    for name, node in nodes():
        if name.startswith("memq/") and isinstance(node, ast.ClassDef):
            places.setdefault(node.name, []).append(name)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice, f"rename one of each: {twice}"


def test_no_test_sleeps() -> None:
    """A sleep is either too short or too long; wait for the event. The simulation sleeps in virtual time."""
    found = []
    for name, node in nodes():
        if name.startswith("tests/") and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            yields = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            real = owner == "time" or (owner == "asyncio" and not yields and not name.startswith("tests/simulation/"))
            if node.func.attr == "sleep" and real:
                found.append(f"{name}:{node.lineno}")
    assert not found, f"wait for the event: {found}"


def test_tests_use_no_private_attribute_of_the_product() -> None:
    """A test that reads a private attribute pins how, not what: give the part a public handle, or test by behaviour."""
    private = {
        node.attr
        for path in files()
        if name_of(path).startswith("memq/")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and node.attr.startswith("_")
    } - {"_replace", "_fields", "_asdict"}  # public methods of a named tuple
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in files()
        if name_of(path).startswith("tests/")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and node.attr in private
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    assert not found, f"uses of private attributes: {found}"


def test_tests_replace_no_private_name_of_the_product() -> None:
    """A name in quotation marks, as in `monkeypatch.setattr`, is a private attribute, too."""
    found = [
        f"{name}:{node.lineno}"
        for name, node in nodes()
        if name.startswith("tests/") and isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr")
        if any(isinstance(each, ast.Constant) and re.search(r"(^|\.)_(?!_)\w*$", str(each.value)) for each in node.args)
    ]
    assert not found, f"give the part a public name that tests can replace: {found}"


def test_every_setting_is_read() -> None:
    """A setting that nobody reads is a promise that nobody keeps."""
    owners = {"settings.py": (BrokerSettings, ClientSettings), "topic.py": (TopicSettings,)}
    read = {
        (name_of(path), node.attr)
        for path in files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and name_of(path).startswith("memq/")
    }
    for home, kinds in owners.items():
        elsewhere = {attribute for name, attribute in read if name != f"memq/{home}"}
        unread = [name for kind in kinds for name in kind.__annotations__ if name not in elsewhere]
        assert not unread, f"nobody reads {unread}"


def test_every_event_of_the_log_is_documented() -> None:
    code, page = logged(), documented()
    assert len(code) > 50
    assert not set(code) - set(page), "docs/events.md lacks these: say what happened and what to do"
    assert not set(page) - set(code), "docs/events.md has these, and nobody logs them"


def test_every_planted_bug_has_its_place() -> None:
    """Whoever changes such a line plants the bug again; that it is found takes minutes, and is tested elsewhere."""
    for bug in BUGS:
        with plant(bug):
            pass


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub forms them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    heads = (re.sub(r"\]\([^)]*\)", "", head) for head in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE))
    return frozenset(re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads)


@pytest.mark.parametrize(
    "page", [page for folder in (".", "docs", "docs/adr", "native") for page in sorted((ROOT / folder).glob("*.md"))]
)
def test_links_of_documents_lead_somewhere(page: Path) -> None:
    broken: list[str] = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken
