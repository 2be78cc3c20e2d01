"""`.ci/run`, with commands that only write down how they were called."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest
import yaml

from tests.commands import ROOT, script

CLOSING = "=== 5 passed, 2 skipped in 3.21s (0:00:03) ==="


@pytest.fixture
def checkout(tmp_path):
    """A folder with .ci/run, and commands that note where and with what they are run."""
    folder = tmp_path / "checkout"
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    note = f'echo "$PWD|make $*|$FLASH_ATTN_CUDA_ARCHS" >> {tmp_path / "notes"}'
    script(tmp_path / "bin" / "make", f'{note}; case "$*" in test) echo "{CLOSING}";; esac')
    for name in ("g++", "ccache", "nm", "nvcc", "apt-get"):
        script(tmp_path / "bin" / name, "exit 0")
    return folder


def run_ci(checkout, **env):
    """Its output, and (folder, command, FLASH_ATTN_CUDA_ARCHS) of each make."""
    path = f"{checkout.parent / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [checkout / ".ci" / "run"],
        env={**os.environ, "PATH": path, **env}, capture_output=True, text=True,
    )  # fmt: skip
    notes = (checkout.parent / "notes").read_text().splitlines()
    return done, [tuple(line.split("|")) for line in notes]


def readme_commands() -> list[str]:
    section = (ROOT / "README.md").read_text().split("## Two commands")[1]
    return re.search(r"```sh\n(.*?)```", section, re.DOTALL)[1].splitlines()


def test_it_starts_with_the_readmes_commands(checkout):
    done, calls = run_ci(checkout, FLASH_ATTN_CUDA_ARCHS="90a")
    assert done.returncode == 0, done.stderr
    readme = readme_commands()
    assert len(readme) == 2
    assert calls[: len(readme)] == [(str(checkout), command, "") for command in readme]
    assert {archs for _, _, archs in calls[len(readme) + 1 :]} == {"80;90a"}  # after lint


def test_it_ends_with_the_time_of_each_step_and_what_the_suite_said(checkout):
    done, calls = run_ci(checkout)
    table = done.stdout.split(" seconds  step\n")[1].splitlines()
    steps = [command for line in table[1:-2] for command in line[10:].split(", ")]
    assert steps[:-2] == [command for _, command, _ in calls[:-2]]
    assert sorted(steps[-2:]) == sorted(command for _, command, _ in calls[-2:])  # side by side
    assert all(re.match(r" *\d+  ", line) for line in table[:-1])
    assert table[-1] == CLOSING


def test_it_ends_where_a_command_fails(checkout):
    script(checkout.parent / "bin" / "make", f'echo "|$*|" >> {checkout.parent / "notes"}; exit 1')
    done, calls = run_ci(checkout)
    assert done.returncode != 0
    assert len(calls) == 1


@pytest.mark.parametrize("failing", ["docs", "newest"])
def test_it_fails_where_one_of_two_side_by_side_does(checkout, failing):
    note = f'echo "|$*|" >> {checkout.parent / "notes"}; echo "out of $*"; echo "{CLOSING}"'
    script(checkout.parent / "bin" / "make", f'{note}; test "$*" != {failing}')
    done, calls = run_ci(checkout)
    assert done.returncode != 0
    assert sorted(command for _, command, _ in calls[-2:]) == ["docs", "newest"]
    assert {"out of docs", "out of newest"} <= set(done.stdout.splitlines())


def test_where_things_were_built_it_runs_in_a_copy_without_them(checkout):
    subprocess.run(["git", "init", "-q", checkout], check=True)
    (checkout / ".gitignore").write_text("build\n")
    (checkout / "build").mkdir()
    note = f'ls -A > {checkout.parent}/listing; echo "$PWD|make $*|" >> {checkout.parent / "notes"}'
    script(checkout.parent / "bin" / "make", f'{note}; echo "{CLOSING}"')
    done, calls = run_ci(checkout)
    assert done.returncode == 0, done.stderr
    (folder,) = {folder for folder, _, _ in calls}
    assert folder != str(checkout)
    assert not os.path.exists(folder)
    assert (checkout.parent / "listing").read_text().split() == [".ci", ".gitignore"]


@pytest.fixture
def workflow_jobs() -> dict:
    return yaml.safe_load((ROOT / ".github" / "workflows" / "build.yml").read_text())["jobs"]


def test_the_workflow_runs_targets_that_there_are(workflow_jobs):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for job in workflow_jobs.values():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        called = {name for command in commands for name in re.findall(r"\bmake ([a-z]+)", command)}
        assert called
        assert called <= {*targets, "ccache"}  # "make ccache" are two packages


def test_the_workflow_tries_the_oldest_python_and_torch_that_are_promised(workflow_jobs):
    project = (ROOT / "pyproject.toml").read_text()
    matrix = workflow_jobs["cpu"]["strategy"]["matrix"]
    assert f'requires-python = ">={matrix["python"][0]}"' in project
    assert f'dependencies = ["torch>={matrix["torch"][0].split("==")[1][:-2]}"]' in project
    assert f"TORCH ?= {matrix['torch'][-1]}" in (ROOT / "Makefile").read_text()
