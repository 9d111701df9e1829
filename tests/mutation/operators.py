"""Makes mutants by operators on the syntax tree: each change that one of them allows inside a function.

Theory. A fault counts when a user could notice it. So messages, narration in the log, annotations and assertions of
what cannot be are left as they are, and so are constants outside functions: those are tuned, not right or wrong.
"""

from __future__ import annotations

import ast
import builtins
import itertools
from collections.abc import Callable, Iterator

from memq import errors
from tests.mutation.mutant import ROOT, Mutant

LOOSER: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
BOUNDS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
NARRATION = frozenset({"debug", "info"})
LOG_LINES = frozenset({"warning", "error"})
FILLS = frozenset({"append", "clear"})
SYNCS = frozenset({"sync_file", "fsync", "fdatasync", "sync", "sync_folder", "flush"})
COARSE = 100  # from here on ± 1 is within what rounding does to times and sizes
LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Finder:
    """Collects the mutants of one file, in the order of its text."""

    def __init__(self, path: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._data = source.encode()
        self._line_starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._names: list[str] = []
        self._inside = False  # of a function
        self._seen: dict[tuple[str, str, str, str], int] = {}
        self._makers: dict[type[ast.AST], Callable[[ast.AST], None]] = {
            ast.If: self._condition,
            ast.While: self._condition,
            ast.IfExp: self._condition,
            ast.comprehension: self._conditions,
            ast.Compare: self._compare,
            ast.BoolOp: self._boolean,
            ast.UnaryOp: self._not,
            ast.Call: self._call,
            ast.ExceptHandler: self._handler,
            ast.Constant: self._constant,
            ast.Return: self._return,
            ast.BinOp: self._arithmetic,
            ast.AugAssign: self._augmented,
            ast.Continue: self._continue,
        }

    def walk(self, node: ast.AST) -> None:
        """Visit a node and all below it."""
        if isinstance(node, LEFT_ALONE) or is_narration(node) or is_wording(node):
            return
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            self._definition(node)
            return
        if self._inside and (make := self._makers.get(type(node))):
            make(node)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if self._inside and isinstance(statements, list):
                self._statements(statements)
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.AnnAssign) and child is node.annotation) and not is_docstring(child):
                self.walk(child)

    def _definition(self, node: ast.ClassDef | Function) -> None:
        if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in getattr(node, "bases", ())):
            return
        if node.name in ("__repr__", "__str__"):
            return
        before = self._inside
        self._inside = self._inside or not isinstance(node, ast.ClassDef)
        self._names.append(node.name)
        if not isinstance(node, ast.ClassDef):
            self._statements(node.body)
            self._early_return(node)
        for statement in node.body:
            if not is_docstring(statement):
                self.walk(statement)
        self._names.pop()
        self._inside = before

    # ---- one operator each -------------------------------------------------------------------------

    def _condition(self, node: ast.AST) -> None:
        assert isinstance(node, ast.If | ast.While | ast.IfExp)
        self._negate(node.test)

    def _conditions(self, node: ast.AST) -> None:
        assert isinstance(node, ast.comprehension)
        for test in node.ifs:
            self._negate(test)

    def _negate(self, test: ast.expr) -> None:
        turned = isinstance(test, ast.Compare) and len(test.ops) == 1 and not isinstance(test.ops[0], BOUNDS)
        if not (turned or is_not(test) or isinstance(test, ast.Constant)):  # other operators make the same of these
            self._emit("condition negated", test, f"(not ({self._text(test)}))")

    def _compare(self, node: ast.AST) -> None:
        assert isinstance(node, ast.Compare)
        kind = "bound moved" if isinstance(node.ops[0], BOUNDS) else "comparison turned"
        if kind == "bound moved" and any(map(is_time_in_s, (node.left, *node.comparators))):
            return  # a float: that it is equal to the last bit happens to nobody
        parts = [self._operand(node.left)]
        for op, right in zip(node.ops, node.comparators, strict=True):
            parts += [ast.unparse(ast.Compare(ast.Name("a"), [op], [ast.Name("b")]))[2:-2], self._operand(right)]
        for number, op in enumerate(node.ops):
            changed = list(parts)
            changed[2 * number + 1] = LOOSER[type(op)]
            self._emit(kind, node, " ".join(changed))

    def _boolean(self, node: ast.AST) -> None:
        assert isinstance(node, ast.BoolOp)
        word = "or" if isinstance(node.op, ast.And) else "and"
        values = (f"({self._text(value)})" for value in node.values)
        self._emit("and/or swapped", node, "(" + f" {word} ".join(values) + ")")

    def _not(self, node: ast.AST) -> None:
        assert isinstance(node, ast.UnaryOp)
        if is_not(node):
            self._emit("not removed", node, f"bool({self._text(node.operand)})")

    def _call(self, node: ast.AST) -> None:
        assert isinstance(node, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            self._emit("min/max swapped", node.func, "max" if node.func.id == "min" else "min")
        made = name_of(node.func)[:1].isupper()  # a field that an object needs: a mutant that cannot run
        for keyword in node.keywords:
            value = keyword.value
            if name_of(node.func) == "zip":
                continue  # `strict` asserts that the lengths are equal
            if isinstance(value, ast.Constant) and isinstance(value.value, bool):
                self._emit("flag turned", value, str(not value.value))
            elif keyword.arg and not made and name_of(node.func) not in ("min", "max", "sort", "sorted", "replace"):
                rest = [each for each in (*node.args, *node.keywords) if each is not keyword]
                text = ", ".join(self._text(each) for each in rest)
                self._emit("argument ignored", node, f"{self._text(node.func)}({text})")

    def _handler(self, node: ast.AST) -> None:
        assert isinstance(node, ast.ExceptHandler)
        if node.type is None:
            return
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        wider = list(dict.fromkeys(wider_than(kind) or self._text(kind) for kind in kinds))
        texts = [self._text(kind) for kind in kinds]
        if wider != texts and ("MemqError" not in wider or b"MemqError" in self._data):  # else it is not imported
            self._emit("except widened", node.type, wider[0] if len(wider) == 1 else f"({', '.join(wider)})")
        for text in texts if len(texts) > 1 else ():
            rest = [each for each in texts if each != text]
            self._emit("except narrowed", node.type, f"({', '.join(rest)},)")

    def _constant(self, node: ast.AST) -> None:
        assert isinstance(node, ast.Constant)
        if isinstance(node.value, int) and not isinstance(node.value, bool) and node.value < COARSE:
            self._emit("constant + 1", node, str(node.value + 1))
            if node.value > 0:
                self._emit("constant - 1", node, str(node.value - 1))

    def _return(self, node: ast.AST) -> None:
        assert isinstance(node, ast.Return)
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
            self._emit("answer turned", node.value, str(not node.value.value))

    def _arithmetic(self, node: ast.AST) -> None:
        assert isinstance(node, ast.BinOp)
        texts = any(isinstance(each, ast.JoinedStr) or is_text(each) for each in (node.left, node.right))
        if isinstance(node.op, ast.Add | ast.Sub) and not texts:
            word = "-" if isinstance(node.op, ast.Add) else "+"
            self._emit("plus/minus swapped", node, f"({self._operand(node.left)} {word} ({self._text(node.right)}))")

    def _augmented(self, node: ast.AST) -> None:
        assert isinstance(node, ast.AugAssign)
        counted = "counters" in self._text(node.target) or "metrics" in self._text(node.target)
        if isinstance(node.op, ast.Add | ast.Sub) and not counted:
            word = "-=" if isinstance(node.op, ast.Add) else "+="
            self._emit("plus/minus swapped", node, f"{self._text(node.target)} {word} {self._text(node.value)}")

    def _continue(self, node: ast.AST) -> None:
        self._emit("continue to break", node, "break")

    def _statements(self, statements: list[ast.stmt]) -> None:
        """Drop each call and each guard, and swap neighbours."""
        for statement in statements:
            if is_call(statement) and not is_narration(statement):
                text = self._text(statement)
                await_ = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Await)
                kind = "await dropped" if await_ else "call dropped"
                kind = "sync dropped" if called(statement) in SYNCS else kind
                self._emit(kind, statement, "__class__" if "super()" in text else "pass")
            elif is_guard(statement):
                self._emit("guard dropped", statement, "pass")
        for first, second in itertools.pairwise(statements):
            if swappable(first, second):
                self._emit(
                    "order swapped",
                    first,
                    self._text(second) + self._between(first, second) + self._text(first),
                    second,
                )

    def _early_return(self, node: Function) -> None:
        body = [statement for statement in node.body if not is_docstring(statement)]
        answers = any(
            isinstance(each, ast.Return | ast.Yield | ast.YieldFrom) and each.value is not None
            for each in ast.walk(node)
        )
        if len(body) >= 4 and not answers:
            middle = body[len(body) // 2]
            indent = " " * middle.col_offset
            self._emit("early return", middle, f"return\n{indent}{self._text(middle)}")

    # ---- text --------------------------------------------------------------------------------------

    def _place(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._line_starts[node.lineno - 1] + node.col_offset
        return start, self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, end = self._place(node)
        return self._data[start:end].decode()

    def _operand(self, node: ast.AST) -> str:
        """Return the text of an operand, in parentheses where it binds less than an operator."""
        loose = isinstance(node, ast.IfExp | ast.BoolOp | ast.Compare | ast.NamedExpr | ast.Lambda)
        return f"({self._text(node)})" if loose or is_not(node) else self._text(node)

    def _between(self, first: ast.AST, second: ast.AST) -> str:
        return self._data[self._place(first)[1] : self._place(second)[0]].decode()

    def _emit(self, operator: str, node: ast.AST, new: str, last: ast.AST | None = None) -> None:
        """Note a change of the text of `node`, or from there to the end of `last`."""
        start, end = self._place(node)[0], self._place(last or node)[1]
        old = self._data[start:end].decode()
        function = ".".join(self._names)
        same = (function, operator, old, new)
        at = self._seen[same] = self._seen.get(same, -1) + 1
        line = self._data.count(b"\n", 0, start) + 1
        self.found.append(Mutant(self._path, function, line, operator, start, end, old, new, at))


def is_time_in_s(node: ast.AST) -> bool:
    """Whether a clock's seconds go into an operand."""
    return any(
        name_of(each).endswith("_s") or (isinstance(each, ast.Call) and name_of(each.func) in ("monotonic", "time"))
        for each in ast.walk(node)
    )


def is_not(node: ast.AST) -> bool:
    """Whether this is `not` something."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def wider_than(kind: ast.AST) -> str:
    """Return the family of an error that is memq's or the operating system's, "" for another one."""
    name = name_of(kind)
    if name != "MemqError" and isinstance(getattr(errors, name, None), type):
        return "MemqError"
    builtin = getattr(builtins, name, None)
    return "OSError" if isinstance(builtin, type) and issubclass(builtin, OSError) and builtin is not OSError else ""


def name_of(node: ast.AST) -> str:
    """Return the last part of a dotted name, "" for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def called(node: ast.AST) -> str:
    """Return the name of what a statement calls, "" when it is no call."""
    value = node.value if isinstance(node, ast.Expr) else node
    value = value.value if isinstance(value, ast.Await) else value
    return name_of(value.func) if isinstance(value, ast.Call) else ""


def is_call(node: ast.AST) -> bool:
    """Whether a statement is a call whose answer nobody takes."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)


def is_narration(node: ast.AST) -> bool:
    """Whether this writes a line of the log that asks nobody to act."""
    return isinstance(node, ast.Expr | ast.Call) and called(node) in NARRATION


def is_wording(node: ast.AST) -> bool:
    """Whether this chooses between parts of a message."""
    return isinstance(node, ast.IfExp) and any(isinstance(each, ast.JoinedStr) for each in (node.body, node.orelse))


def is_docstring(node: ast.AST) -> bool:
    """Whether this is a text that is a statement of its own."""
    return isinstance(node, ast.Expr) and is_text(node.value)


def is_text(node: ast.AST) -> bool:
    """Whether this is a constant text or constant bytes."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def is_guard(node: ast.stmt) -> bool:
    """Whether this is an `if` that only leaves: its function, its loop or the turn of it."""
    leaves = (ast.Return, ast.Continue, ast.Break, ast.Raise)
    return isinstance(node, ast.If) and not node.orelse and len(node.body) == 1 and isinstance(node.body[0], leaves)


def swappable(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether two neighbours could stand in the other order: both act, and the second uses no name the first makes."""
    if not all(is_call(each) or is_attribute_write(each) for each in (first, second)):
        return False
    if not is_call(second) or is_narration(first) or is_narration(second):
        return False
    if not is_call(first) and not isinstance(getattr(second, "value", None), ast.Await):
        return False  # what is called at once rarely reads what is noted before it
    if commute(first, second):
        return False
    return not (first.lineno == second.lineno or "super()" in ast.unparse(first))


def commute(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether two neighbours do the same in either order: a line of the log, a wake-up, or two containers of their own.

    A task that an event wakes runs only after both, unless one of them awaits.
    """
    if LOG_LINES & {called(first), called(second)}:
        return True
    if any(isinstance(each, ast.Expr) and isinstance(each.value, ast.Await) for each in (first, second)):
        return False
    return is_wake_up(first) or is_wake_up(second) or {called(first), called(second)} <= FILLS


def is_wake_up(node: ast.stmt) -> bool:
    """Whether a statement sets an event, and does nothing else."""
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and name_of(call.func) == "set" and not (call.args or call.keywords)


def is_attribute_write(node: ast.stmt) -> bool:
    """Whether a statement changes attributes or items alone: no name is made that what follows would miss."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return bool(targets) and all(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)


def mutants_of(path: str) -> Iterator[Mutant]:
    """Yield the mutants of one file of the product."""
    source = (ROOT / path).read_text(encoding="utf-8")
    finder = Finder(path, source)
    finder.walk(ast.parse(source))
    yield from finder.found
