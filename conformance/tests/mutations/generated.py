"""Random mutations of the product's source, to measure how many mistakes the tests find.

As a program, ``python generated.py COUNT SEED FOLDER...`` makes one mutation at a time, in the entries of `SUITES`
below the given folders, or in all. Only statements that the entry's suites reach are mutated. The program prints the
test that found each mutation, and the scores. First all suites must pass without a mutation, while `reaching` records
which lines each test reaches. Then only tests that reach the mutated line run with the mutation, the quickest first,
until one fails. A mutation that breaks no promise isn't counted (`EQUIVALENT`).
"""

from __future__ import annotations

import ast
import contextlib
import copy
import hashlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NamedTuple

import reaching
from equivalent import EQUIVALENT

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
VARIABLE = "MUTANT"
"""The environment variable for a mutation, as ``NUMBER PATH``."""
KEPT = ROOT / "build" / "mutations"
"""The directory of the records of earlier runs without a mutation."""
SLOWER = 10
"""The factor by which a run may be slower than without a mutation, besides a minute."""
HANGS = 60
"""The timeout of a test in seconds. A test or run that exceeds its timeout has found the mutation."""

_ENGINES, _LAYOUTS = "backends/tests/test_conformance.py", "layouts/tests/test_conformance.py"
_DATABASES, _PARTS = (f"conformance/tests/databases/test_{name}.py" for name in ("conformance", "parts"))


def _suites(file: str, *names: str) -> list[str]:
    return [f"{file}::Test{name}" for name in names]


_OF_PARTS = _suites(_PARTS, "RocksdbBlock")
_OF_STORAGE = [*_suites(_DATABASES, "MemoryBlock", "RocksdbBlock"), *_OF_PARTS]
SUITES = {
    "backends/topicstore_backends/memory.py": _suites(_ENGINES, "Memory", "TinyMemory"),
    "backends/topicstore_backends/rocksdb/": _suites(_ENGINES, "Rocksdb", "TinyRocksdb"),
    "backends/topicstore_backends/leveldb/": _suites(_ENGINES, "Leveldb", "TinyLeveldb"),
    "backends/topicstore_backends/duckdb/": _suites(_ENGINES, "Duckdb", "TinyDuckdb"),
    "backends/topicstore_backends/files.py": _suites(_ENGINES, "Rocksdb", "Leveldb", "Duckdb"),
    "backends/topicstore_backends/write_ahead_logs.py": _suites(_ENGINES, "Rocksdb", "Leveldb"),
    "layouts/topicstore_layouts/reference.py": _suites(_LAYOUTS, "Reference"),
    "layouts/topicstore_layouts/block/": _suites(_LAYOUTS, "Block", "BlockOfFewRows"),
    "layouts/topicstore_layouts/table.py": _suites(_LAYOUTS, "Table"),
    "layouts/topicstore_layouts/shared/": _suites(_LAYOUTS, "Block", "BlockOfFewRows", "Skipstream"),
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

_HUNG = 124
"""The exit code of a run that exceeded its timeout."""
_PLUGINS = ("xdist.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
"""The pytest plugins that the tests need; importing all that are installed takes longer than most tests."""
_OPTIONS = (
    *("-x", "-q", "-m", "not slow", "--tb=no", f"--timeout={HANGS}", "-p", "no:cacheprovider"),
    *("-o", "addopts=", "--import-mode=importlib"),
    *(option for plugin in _PLUGINS for option in ("-p", plugin)),
)

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
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_LEFT = (ast.FunctionDef, ast.ClassDef, ast.JoinedStr, ast.pattern)
"""The nodes that are not changed or searched; nested functions are visited on their own."""
_UNSEEN = {ast.AnnAssign: "annotation", ast.Raise: "exc"}
"""The fields that are not searched: types, which nothing evaluates, and errors, whose texts are no promises."""

Reached = dict[str, tuple[float, list[tuple[str, int]]]]
"""The seconds of each test, and the statements that it reaches, each by its file and line."""
Node = ast.expr | list[ast.stmt]
Place = tuple[ast.AST, str, int | None]
"""The location of a node: its parent, the field, and the index if the field is a list."""


class Mutation(NamedTuple):
    """A mutation of a source's syntax tree."""

    place: Place
    new: Node
    line: int
    """The line of the statement around the place."""
    function: str
    """The name of the function around the place."""


def changes_of(node: ast.AST) -> Iterator[Node]:
    """Yield the mutations of an expression or a statement."""
    yield from _changed_operators(node)
    yield from _changed_calls(node)
    yield from _changed_statements(node)


def _changed_operators(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(left, [operator], right):
            yield ast.Compare(left, [_COMPARED[type(operator)]()], right)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.And() if isinstance(operator, ast.Or) else ast.Or(), values)
        case ast.BinOp(left, operator, right) if type(operator) in _COMPUTED:
            yield ast.BinOp(left, _COMPUTED[type(operator)](), right)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Constant(value) if type(value) is int:
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)


def _changed_calls(node: ast.AST) -> Iterator[ast.expr]:
    """Yield a call with swapped arguments, or what it is called with."""
    match node:
        case ast.Call(ast.Name("min" | "max"), [_, _, *_]):
            return  # the order of their arguments doesn't matter
        case ast.Call(called, [first, second, *others], keywords) if not isinstance(first, ast.Starred):
            yield ast.Call(called, [second, first, *others], keywords)
        case ast.Call(_, [argument], []) if not isinstance(argument, ast.Starred | ast.GeneratorExp):
            yield argument
        case ast.Call(ast.Attribute(owner), [], []):
            yield owner


def _changed_statements(node: ast.AST) -> Iterator[list[ast.stmt]]:
    match node:
        case ast.If(test, body, orelse) | ast.While(test, body, orelse):
            yield [type(node)(ast.UnaryOp(ast.Not(), test), body, orelse)]
        case ast.Break():
            yield [ast.Continue()]
        case ast.Continue():
            yield [ast.Break()]
        case ast.Expr(ast.Call()) | ast.Raise() | ast.AugAssign() | ast.Delete():
            yield [ast.Pass()]
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield [ast.Pass()]
        case ast.With(items, body) if all("lock" in ast.unparse(item) for item in items):
            yield body


def mutations(tree: ast.AST) -> Iterator[Mutation]:
    """Yield the mutations within functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for place, new, line in _within(node, ["body"], node.lineno):
                yield Mutation(place, new, line, node.name)


def _within(parent: ast.AST, fields: Sequence[str], line: int) -> Iterator[tuple[Place, Node, int]]:
    for field in fields:
        value = getattr(parent, field)
        if field == _UNSEEN.get(type(parent)):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not isinstance(child, _LEFT):
                around = child.lineno if isinstance(child, ast.stmt) else line
                for new in changes_of(copy.deepcopy(child)):
                    yield (parent, field, index), new, around
                yield from _within(child, child._fields, around)


def changed(source: str, number: int) -> tuple[ast.AST, int, str, str]:
    """Return a source's syntax tree with one mutation; its line, its function, and a description."""
    tree = ast.parse(source)
    (parent, field, index), new, _, function = next(itertools.islice(mutations(tree), number, None))
    value = getattr(parent, field)
    node = value if index is None else value[index]
    if isinstance(new, list):
        value[index : index + 1] = new
    elif index is None:
        setattr(parent, field, new)
    else:
        value[index] = new
    described = "; ".join(map(ast.unparse, new)) if isinstance(new, list) else ast.unparse(new)
    for each in ast.walk(tree):
        if not hasattr(each, "lineno"):
            ast.copy_location(each, node)
    described = f"{ast.unparse(node).splitlines()[0]}  →  {described.splitlines()[0]}"
    return ast.fix_missing_locations(tree), node.lineno, function, described


def install() -> None:
    """Make this process import the mutated file with its mutation."""
    number, _, path = os.environ[VARIABLE].partition(" ")
    load = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> object:
        if loader.path != path:
            return load(loader, name)
        return compile(changed(Path(path).read_text(), int(number))[0], path, "exec")

    SourceFileLoader.get_code = get_code


def _pytest(arguments: Sequence[str], timeout: float | None = None, **variables: str) -> tuple[int, str]:
    """Run pytest in a child process; return its exit code, or `_HUNG` after a timeout, and its output."""
    environment = {**os.environ, "TOPICSTORE_CONFORMANCE": "quick", "PYTHONPATH": str(HERE), "PYTHONHASHSEED": "0"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", *_OPTIONS, *arguments]
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(
            command, cwd=ROOT, env=environment | variables, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = _HUNG
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the tests' processes may hang as well
        output.seek(0)
        return code, output.read()


def reached(suite: str) -> Reached:
    """Return what each test of a suite reaches, as `reaching.read` does; exit if one fails without a mutation."""
    folders = "backends", "layouts", "framework/topicstore", "conformance/topicstore_conformance"
    sources = [path for folder in (*folders, Path(_PARTS).parent) for path in sorted((ROOT / folder).rglob("*.py"))]
    digest = hashlib.sha256(suite.encode())
    for path in sources:
        digest.update(path.read_bytes())
    directory = KEPT / digest.hexdigest()[:16]
    if not (directory / "whole").exists():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tests").unlink(missing_ok=True)
        reaching.prepare(directory, [file for of in SUITES for file in _files(ROOT / of)])
        code, output = _pytest([suite, "-p", "reaching"], **{reaching.VARIABLE: str(directory)})
        if code:
            raise SystemExit(f"{suite} fails without a mutation\n{output}")
        (directory / "whole").touch()
    return reaching.read(directory)


def outcome(file: Path, number: int, tests: Sequence[str], seconds: float) -> str:
    """Run the given tests with a mutation; return the failed test or an empty string.

    The tests take ``seconds`` without the mutation.
    """
    code, output = _pytest(tests, 60 + SLOWER * seconds, **{VARIABLE: f"{number} {file}"})
    if not code:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return failed[1] if failed else "no end" if code == _HUNG else f"exit code {code}"


def main(count: int, seed: int, *folders: str) -> None:
    """Make ``count`` mutations, and print their outcomes; exit if tests fail without a mutation."""
    chosen = {of: tests for of, tests in SUITES.items() if not folders or of.startswith(folders)}
    of_suites = {suite: reached(suite) for suite in sorted({suite for tests in chosen.values() for suite in tests})}
    records: dict[str, Reached] = {
        of: {test: found for suite in tests for test, found in of_suites[suite].items()} for of, tests in chosen.items()
    }
    sites = []
    for of, record in records.items():
        for file in _files(ROOT / of):
            lines = {line for _, places in record.values() for name, line in places if name == str(file)}
            made = enumerate(mutations(ast.parse(file.read_text())))
            sites += [(of, file, number, one.line) for number, one in made if one.line in lines]
    random.Random(seed).shuffle(sites)
    found: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for of, file, number, line in sites:
        if made.total() == count:
            break
        source, name = file.read_text(), str(file.relative_to(ROOT))
        _, at, function, change = changed(source, number)
        if (function, source.splitlines()[at - 1].strip(), change) in EQUIVALENT.get(name, {}):
            continue
        record = records[of]
        tests = sorted((test for test in record if (str(file), line) in record[test][1]), key=lambda test: record[test])
        by = outcome(file, number, tests, sum(record[test][0] for test in tests))
        print(f"{'found' if by else 'SURVIVED':<9} {name}:{at}: {change}  {by.rpartition('/')[2]}", flush=True)
        made[of] += 1
        found[of] += bool(by)
    for of, total in made.items():
        print(f"{of}: {found[of]} of {total}")
    print(f"seed {seed}: {found.total()} of {made.total()} mutations were found, of {len(sites)} possible ones")


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
