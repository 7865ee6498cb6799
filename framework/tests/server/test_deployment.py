"""The files for deploying servers: the systemd unit, the container image, and the image's settings."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from fnmatch import fnmatch
from pathlib import Path

import pytest
from topicstore.server import read_settings
from topicstore_conformance.mqtt.serving import serving

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "examples" / "deployment"
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
NOTIFY_RELOAD = 253
"""The first version of systemd with ``Type=notify-reload``."""


def instructions(name: str) -> list[str]:
    """Return the arguments of the Dockerfile's instructions of one kind."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


def systemd_version() -> int:
    """Return the version of systemd; skip the test if its tools are missing."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    shown = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True, check=True).stdout
    return int(shown.split()[1])


@pytest.mark.slow
def test_the_unit_is_valid_and_gives_the_server_little(tmp_path: Path) -> None:
    """The tools of systemd find nothing wrong with the unit, and rate its exposure as at most 2 of 10."""
    text = (DEPLOY / "topicstore.service").read_text()
    text = text.replace("/opt/topicstore/bin/topicstore", sys.executable)  # the program must exist
    if systemd_version() < NOTIFY_RELOAD:
        text = text.replace("Type=notify-reload", "Type=notify")
    unit = tmp_path / "topicstore.service"
    unit.write_text(text)
    for command in (["verify"], ["security", "--offline=true", "--threshold=20"]):
        done = subprocess.run(["systemd-analyze", *command, unit], capture_output=True, text=True)
        assert 0 == done.returncode, done.stdout + done.stderr
        assert command != ["verify"] or "" == done.stderr


def test_the_unit_starts_the_command_with_options_that_it_has() -> None:
    """The unit's command is `topicstore serve` with a settings file and a directory that systemd creates."""
    text = (DEPLOY / "topicstore.service").read_text()
    program, *arguments = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1])
    assert ["serve", "--config", "/etc/topicstore/server.toml", "/var/lib/topicstore/data"] == arguments
    assert "topicstore" == Path(program).name
    assert "StateDirectory=topicstore\n" in text


def test_the_image_copies_what_there_is() -> None:
    """Each file that the Dockerfile copies is in the repository, and the build context doesn't exclude it."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert "*" == ignored[0]
    let_in = [pattern.removeprefix("!") for pattern in ignored if pattern.startswith("!")]
    for copied in instructions("COPY"):
        if not copied.startswith("--from"):
            for source in copied.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert any(fnmatch(pattern, f"{source}*") or source == pattern for pattern in let_in), source
    assert [] == [pattern for pattern in let_in if not (ROOT / pattern).exists()]


def test_the_server_of_the_image_is_not_root_and_keeps_a_volume() -> None:
    """The last stage has an unprivileged user, a volume for all paths in its settings, and a health check."""
    assert ["topicstore"] == instructions("USER")
    (volume,) = instructions("VOLUME")
    settings = read_settings(DEPLOY / "container.toml", {})
    assert settings.http is not None
    for path in (settings.messages.data_dir, settings.authentication.password_file, settings.http.token_file):
        assert path is not None
        assert path.is_relative_to(volume)
    ports = {address.port for one in settings.listeners.values() for address in one.listen.all}
    assert {str(port) for port in ports | {settings.http.listen.all[0].port}} <= set(instructions("EXPOSE")[0].split())


@pytest.mark.slow
def test_the_health_check_asks_the_server(tmp_path: Path) -> None:
    """With the image's settings, the health check passes while the server can store, and fails once it has ended."""
    check = json.loads(instructions("HEALTHCHECK")[0].partition("CMD ")[2])
    assert "python" == check[0]
    places = {
        "DURABLE_STORAGE__MESSAGES__DATA_DIR": tmp_path / "data",
        "AUTHENTICATION__PASSWORD_FILE": tmp_path / "users",
        "HTTP__TOKEN_FILE": tmp_path / "tokens",
        "HTTP__LISTEN": "127.0.0.1:0",
        "LISTENERS__MQTT__LISTEN": "127.0.0.1:0",
    }
    environment = {**os.environ, **{f"TOPICSTORE__{name}": str(value) for name, value in places.items()}}
    add = [sys.executable, "-m", "topicstore.cli", "users", "add", "ann", "--file", str(tmp_path / "users")]
    subprocess.run(add, input=b"a password\n", check=True, capture_output=True)
    with serving(None, "--config", str(DEPLOY / "container.toml"), listen=False, env=environment) as server:
        here = server.ready["http"][0]
        command = [sys.executable, *(part.replace("127.0.0.1:18083", here) for part in check[1:])]
        assert here in command[-1]
        assert 0 == subprocess.run(command, capture_output=True).returncode
        assert 0 == server.stop()
        assert 0 != subprocess.run(command, capture_output=True).returncode


@pytest.mark.slow
def test_the_steps_of_the_image_install_the_program(tmp_path: Path) -> None:
    """The build stage's steps, run without Docker on the files that they copy, install a program that runs.

    The dependencies are those of this environment, so that nothing is downloaded.
    """
    build, _, last = DOCKERFILE.partition("\nFROM ")[2].partition("\nFROM ")
    source, target = tmp_path / "src", tmp_path / "opt"
    source.mkdir()
    variables = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # the build backend is this environment's, too
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    environment = {**os.environ, **variables}
    for kind, arguments in re.findall(r"^(COPY|RUN) (.*)$", build, re.MULTILINE):
        if kind == "COPY":
            *paths, place = arguments.split()
            for path in paths:
                copied = source / (place if len(paths) == 1 else path)
                copied.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
                copy(ROOT / path, copied)
        else:
            step = arguments.replace("/opt/topicstore", str(target))
            done = subprocess.run(step, shell=True, cwd=source, env=environment, capture_output=True, text=True)
            assert 0 == done.returncode, done.stdout + done.stderr
    assert "COPY --from=build /opt/topicstore /opt/topicstore" in last
    where = "import topicstore; print(topicstore.__file__)"
    found = subprocess.run([target / "bin" / "python", "-c", where], capture_output=True, text=True, env=environment)
    assert Path(found.stdout.strip()).is_relative_to(target), found
    shown = [str(target / "bin" / "topicstore"), "config", "check", "--config", DEPLOY / "container.toml"]
    assert "there is no file of users" in subprocess.run(shown, capture_output=True, text=True, env=environment).stderr


@pytest.mark.slow
def test_the_image_can_be_built() -> None:
    """Docker builds the image, and its program runs."""
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("needs a running Docker daemon")
    subprocess.run(["docker", "build", "--quiet", "--tag", "topicstore-test", ROOT], check=True, capture_output=True)
    run = ["docker", "run", "--rm", "topicstore-test", "--version"]
    assert "topicstore" in subprocess.run(run, check=True, capture_output=True, text=True).stdout


def test_what_is_composed_is_there() -> None:
    """Each file that `compose.yaml` mounts is in the repository, except the token; a comment says how to create it."""
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install PyYAML")
    text = (ROOT / "compose.yaml").read_text()
    services = yaml.safe_load(text)["services"]
    assert {"server", "prometheus", "grafana"} == set(services)
    mounted = [volume.split(":")[0] for one in services.values() for volume in one["volumes"] if volume[0] == "."]
    assert ["./prometheus.token"] == [path for path in mounted if not (ROOT / path).exists()]
    assert "> prometheus.token" in text
    (scrape,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert [{"targets": ["server:18083"]}] == scrape["static_configs"]
