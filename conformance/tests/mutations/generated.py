"""Random mutations of the product's source, to measure how many mistakes the tests find.

As a program, ``python generated.py COUNT SEED FOLDER...`` makes one mutation at a time, in these folders of `SUITES`
or in all, runs the suites of the changed folder, and prints each outcome and the scores. The suites must pass without a
mutation. A mutation that no test reaches isn't counted, and neither is one that breaks no promise (`EQUIVALENT`).
"""

from __future__ import annotations

import ast
import copy
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
VARIABLE, REACHED = "MUTANT", "MUTANT_REACHED"
"""The environment variables for a mutation, as ``NUMBER PATH``, and for the file that its line creates when reached."""
MINUTES = 10
"""The timeout of a run; a run that exceeds it counts as finding the mutation, because a test hangs."""

_ENGINES, _LAYOUTS = "backends/tests/test_conformance.py", "layouts/tests/test_conformance.py"
_DATABASES, _PARTS = (f"conformance/tests/databases/test_{name}.py" for name in ("conformance", "parts"))


def _suites(file: str, *names: str) -> list[str]:
    return [f"{file}::Test{name}" for name in names]


_OF_PARTS = _suites(_PARTS, "RocksdbBlock")
_OF_STORAGE = [*_suites(_DATABASES, "MemoryBlock"), *_OF_PARTS]
SUITES = {
    "backends/topicstore_backends/memory.py": _suites(_ENGINES, "Memory", "TinyMemory"),
    "backends/topicstore_backends/rocksdb/": _suites(_ENGINES, "Rocksdb", "TinyRocksdb"),
    "backends/topicstore_backends/leveldb/": _suites(_ENGINES, "Leveldb", "TinyLeveldb"),
    "backends/topicstore_backends/duckdb/": _suites(_ENGINES, "Duckdb", "TinyDuckdb"),
    "layouts/topicstore_layouts/reference.py": _suites(_LAYOUTS, "Reference"),
    "layouts/topicstore_layouts/block/": _suites(_LAYOUTS, "Block", "BlockOfFewRows"),
    "layouts/topicstore_layouts/table.py": _suites(_LAYOUTS, "Table"),
    "layouts/topicstore_layouts/shared/": _suites(_LAYOUTS, "Block", "Skipstream"),
    "layouts/topicstore_layouts/skipstream/": _suites(_LAYOUTS, "Skipstream", "SkipstreamOfFewHashes"),
    "layouts/topicstore_layouts/wildcard_optimized/": _suites(
        _LAYOUTS, "WildcardOptimized", "WildcardOptimizedOfFewBits"
    ),
    "framework/topicstore/shard/": _OF_STORAGE,
    "framework/topicstore/storage/": _OF_STORAGE,
    "framework/topicstore/pubsub/": _OF_PARTS,
    "framework/topicstore/sessions/": _OF_PARTS,
    "framework/topicstore/queues/": _OF_PARTS,
    "framework/topicstore/lifecycle/": _OF_PARTS,
}
"""The suites that must find a mutation, by the file or the folder in which it is made. Other tests don't count."""

EQUIVALENT = {
    (
        "layouts/topicstore_layouts/block/payloads.py",
        "if prefix == _prefix(int(self._sizes.min())) and most < len(self._raw) < 1 << 31:",
        "1  →  2",
    ): "a block has payloads of at most 1 MB, or one message, of at most 256 MB",
    (
        "layouts/topicstore_layouts/skipstream/verification.py",
        "mixed ^= mixed >> np.uint64(31)",
        "mixed ^= mixed >> np.uint64(31)  →  pass",
    ): "the last step of the mixing only spreads bits that are spread already",
}
"""The mutations that break no promise, by file, line and description, each with the reason. They aren't counted."""

_OPTIONS = ("-n0", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider")

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_LEFT = (ast.FunctionDef, ast.ClassDef, ast.JoinedStr, ast.pattern)
"""The nodes that are not changed or searched; nested functions are visited on their own."""


def change_of(node: ast.AST) -> ast.expr | list[ast.stmt] | None:
    """Return the mutation of an expression or a statement, or None if it has none."""
    match node:
        case ast.Compare(left, [operator], right):
            return ast.Compare(left, [_COMPARED[type(operator)]()], right)
        case ast.BoolOp(operator, values):
            return ast.BoolOp(ast.And() if isinstance(operator, ast.Or) else ast.Or(), values)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(value) if type(value) is int:
            return ast.Constant(value + 1)
        case ast.Expr(ast.Call()) | ast.Raise() | ast.AugAssign():
            return [ast.Pass()]
        case ast.With(items, body) if all("lock" in ast.unparse(item) for item in items):
            return body
    return None


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Yield each changeable node within functions by its location: parent, field, and index if the field is a list."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from _within(node, ["body"])


def _within(parent: ast.AST, fields: Sequence[str]) -> Iterator[tuple[ast.AST, str, int | None]]:
    for field in fields:
        value = getattr(parent, field)
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not isinstance(child, _LEFT):
                if change_of(child) is not None:
                    yield parent, field, index
                yield from _within(child, child._fields)


def changed(source: str, number: int) -> tuple[ast.AST, str]:
    """Return a source's syntax tree with one mutation, which also creates the file `REACHED`, and its description."""
    tree = ast.parse(source)
    parent, field, index = list(places(tree))[number]
    value = getattr(parent, field)
    node = value if index is None else value[index]
    new = change_of(copy.deepcopy(node))
    mark = f"open(__import__('os').environ[{REACHED!r}], 'w').close()"
    if isinstance(new, list):
        value[index : index + 1] = [*ast.parse(mark).body, *new]
        told = "; ".join(ast.unparse(each) for each in new)
    else:
        told = ast.unparse(new)
        marked = ast.Subscript(ast.Tuple([ast.parse(mark).body[0].value, new], ast.Load()), ast.Constant(1), ast.Load())
        if index is None:
            setattr(parent, field, marked)
        else:
            value[index] = marked
    for each in ast.walk(tree):
        ast.copy_location(each, node) if not hasattr(each, "lineno") else None
    before = ast.unparse(node).splitlines()[0]
    return ast.fix_missing_locations(tree), f"{node.lineno}: {before}  →  {told.splitlines()[0]}"


def install() -> None:
    """Make this process import the mutated file with its mutation."""
    number, _, path = os.environ[VARIABLE].partition(" ")
    load = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> object:
        if loader.path != path:
            return load(loader, name)
        return compile(changed(Path(path).read_text(), int(number))[0], path, "exec")

    SourceFileLoader.get_code = get_code


def outcome(tests: Sequence[str], path: Path | None = None, number: int = 0) -> str:
    """Run tests with a mutation, or without one; return "found", "survived" or "not reached"."""
    with tempfile.TemporaryDirectory() as directory:
        reached = Path(directory, "reached")
        environment = {**os.environ, "TOPICSTORE_CONFORMANCE": "quick", VARIABLE: f"{number} {path}"}
        environment |= {REACHED: str(reached), "PYTHONPATH": str(HERE), "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "pytest", *_OPTIONS, *tests]
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60 * MINUTES)
        except subprocess.TimeoutExpired:
            return "found"
        if path is None and done.returncode > 1:  # an error of pytest, such as a test that isn't there
            raise SystemExit(done.stdout.decode() + done.stderr.decode())
        return "found" if done.returncode else "survived" if reached.exists() else "not reached"


def main(count: int, seed: int, *folders: str) -> None:
    """Make mutations until ``count`` were reached, and print their outcomes; exit if tests fail without a mutation."""
    chosen = {of: tests for of, tests in SUITES.items() if not folders or of in folders}
    files = {file: of for of in chosen for file in _files(ROOT / of)}
    sites = [(file, number) for file in files for number, _ in enumerate(places(ast.parse(file.read_text())))]
    random.Random(seed).shuffle(sites)
    found: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    passed: list[Sequence[str]] = []
    for file, number in sites:
        if reached.total() == count:
            break
        tests, name = chosen[files[file]], str(file.relative_to(ROOT))
        change = changed(file.read_text(), number)[1]
        line, _, description = change.partition(": ")
        if (name, file.read_text().splitlines()[int(line) - 1].strip(), description) in EQUIVALENT:
            continue
        if tests not in passed:
            if outcome(tests) == "found":
                raise SystemExit(f"these fail without a change: {' '.join(tests)}")
            passed.append(tests)
        became = outcome(tests, file, number)
        print(f"{became:<11}  {name}:{change}", flush=True)
        reached[files[file]] += became != "not reached"
        found[files[file]] += became == "found"
    for of, total in reached.items():
        print(f"{of}: {found[of]} of {total}")
    print(f"seed {seed}: {found.total()} of {reached.total()} changes that were reached were found")


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
