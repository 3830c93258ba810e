"""Makes stand-ins for CUDA's libraries, so that the registry's torch can be imported without gigabytes of CUDA.

The registry's torch for Linux is linked with CUDA's libraries, and calls none of them on a machine without a GPU. A
stand-in has the names of the functions that torch would call, with their symbol versions.
"""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

CUDA = r"(?:cu|nv|nccl)"


def _output(*command: object) -> str:
    return subprocess.run([str(one) for one in command], check=True, capture_output=True, text=True).stdout


def make_stand_ins(packages: Path) -> list[str]:
    """Make a stand-in for each missing library, in the folder of torch's own libraries. Return their names.

    packages   folder of the installed packages

    Raises OSError or CalledProcessError if gcc, nm or readelf is missing or fails.
    """
    folder = packages / "torch" / "lib"
    present = {path.name for path in packages.rglob("*.so*")}
    missing, library_of, undefined = set(), {}, set()
    for path in folder.glob("*.so*"):
        needed = re.findall(rf"\(NEEDED\).*\[(lib{CUDA}[^\]]*)\]", _output("readelf", "-dW", path))
        missing |= set(needed) - present
        library = ""
        for kind, name in re.findall(r"(File|Name): (\S+)", _output("readelf", "-VW", path)):
            if kind == "File":
                library = name
            else:
                library_of[name] = library
        undefined |= set(re.findall(r"^\s+U (\S+)$", _output("nm", "-D", "--undefined-only", path), re.M))
    symbols = defaultdict(set)                             # library -> {(symbol, version)}
    for symbol in undefined:
        name, _, version = symbol.partition("@")
        if version:
            symbols[library_of.get(version)].add((name, version))
        elif re.match(rf"{CUDA}\w+$", name):               # any of the libraries without versions may have it
            symbols[""].add((name, ""))
    versioned = set(library_of.values())
    for library in missing:
        _compile(folder / library, symbols[library if library in versioned else ""])
    return sorted(missing)


def _compile(path: Path, symbols: set[tuple[str, str]]) -> None:
    """Compile a library with these functions, each of which returns 100: there is no device."""
    versions = defaultdict(list)
    for name, version in sorted(symbols):
        versions[version].append(name)
    versions.pop("", None)
    script = path.with_suffix(".map")
    script.write_text("".join(f"{version} {{ {'; '.join(names)}; }};\n" for version, names in versions.items()))
    options = [f"-Wl,--version-script={script}"] if versions else []
    code = "".join(f"int {name}(void) {{ return 100; }}\n" for name, _ in sorted(symbols))
    subprocess.run(["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", *options, "-o",
                    str(path), "-x", "c", "-"], input=code, text=True, check=True)
    script.unlink()
