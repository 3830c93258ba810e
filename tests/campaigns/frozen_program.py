"""The quickstart, frozen with PyInstaller from a wheel, prints what it prints as a script, with and without a compiler.

    python tests/campaigns/frozen_program.py [--keep FOLDER]

The program builds a wheel, unpacks it, freezes examples/quickstart.py with it, and runs the result outside the
checkout. PyInstaller finds the package's hooks through the wheel's entry point. A wheel without the compiled library is
frozen too: its program compiles the step. It needs PyInstaller, a C compiler and 1.5 GB, and takes about four minutes.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ARGUMENTS = ["--model", str(REPOSITORY / "examples" / "models" / "austen-4m"), "--max-new-tokens", "24"]


def call(command: list[str], folder: Path, **variables: str) -> str:
    """Run a command and return its output, both streams. Raises RuntimeError if it fails."""
    result = subprocess.run(command, cwd=folder, env={**os.environ, **variables}, text=True, timeout=1200,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode:
        raise RuntimeError(f"{' '.join(map(str, command[:6]))} ended with {result.returncode}: {result.stdout[-2000:]}")
    return result.stdout


def freeze(folder: Path, with_library: bool) -> Path:
    """Return the program, frozen from a wheel of the checkout."""
    folder.mkdir(parents=True)
    ignored = shutil.ignore_patterns(".git", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(REPOSITORY, folder / "copy", symlinks=True, ignore=ignored)
    call([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder),
          str(folder / "copy")], folder, **({} if with_library else {"PATH": "/nowhere", "CC": ""}))
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    script = folder / "quickstart.py"
    shutil.copy(REPOSITORY / "examples" / "quickstart.py", script)
    # Optional libraries that the program does not use make it large and slow to freeze.
    excluded = [word for name in ("transformers", "tensorboard", "matplotlib", "pandas", "scipy", "IPython", "sklearn")
                for word in ("--exclude-module", name)]
    call([sys.executable, "-m", "PyInstaller", "--onedir", "--noconfirm", *excluded, str(script)], folder,
         PYTHONPATH=str(folder / "installed"))
    return folder / "dist" / "quickstart" / "quickstart"


def texts_of(output: str) -> list[str]:
    """Return the whole texts that a run printed, without lines that depend on time."""
    return re.findall(r"^(?:\[\d+\]|    ).*", output.partition("\nTexts\n")[2], re.M)


def faults_of(program: Path, expected: list[str], folder: Path, with_compiler: bool) -> list[str]:
    """Run the frozen program. Return what is wrong with its output."""
    folder.mkdir()
    variables = {"XDG_CACHE_HOME": str(folder / "cache")} | ({} if with_compiler else {"PATH": "/nowhere", "CC": ""})
    found = texts_of(call([str(program), *ARGUMENTS], folder, **variables))
    differing = [f"{mine!r} instead of {theirs!r}" for mine, theirs in zip(found, expected) if mine != theirs]
    compiled_here = list((folder / "cache").rglob("*.so"))
    if len(found) != len(expected) or not found:
        differing.append(f"{len(found)} lines instead of {len(expected)}")
    if bool(compiled_here) is not with_compiler:
        differing.append(f"the cache has {len(compiled_here)} libraries")
    return [f"{program}: {line}" for line in differing[:5]]


def judge(folder: Path) -> tuple[str, list[str]]:
    """Return (what ran, faults)."""
    expected = texts_of(call([sys.executable, str(REPOSITORY / "examples" / "quickstart.py"), *ARGUMENTS], folder))
    faults, sizes = [], []
    for name, with_library in (("library in the wheel", True), ("compiled by the program", False)):
        place = folder / name.replace(" ", "-")
        program = freeze(place, with_library)
        sizes.append(sum(file.stat().st_size for file in program.parent.rglob("*") if file.is_file()) / 1e6)
        faults += faults_of(program, expected, place / "run", with_compiler=not with_library)
    return (f"the frozen quickstart, with the library in the wheel ({sizes[0]:,.0f} MB) and compiled by the program "
            f"({sizes[1]:,.0f} MB): {len(expected)} lines as the script prints them"), faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="new folder for the programs; default: none")
    folder = parser.parse_args().keep
    if folder is not None:
        folder.mkdir()
        ran, faults = judge(folder.resolve())
    else:
        with tempfile.TemporaryDirectory() as temporary:
            ran, faults = judge(Path(temporary))
    print("\n".join([ran, *faults]))
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
