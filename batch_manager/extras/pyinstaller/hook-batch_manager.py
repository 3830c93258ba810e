"""PyInstaller runs this file for a program that imports batch_manager.

Public names, model families and kernels are imported by name, so the hook names all modules of the engine. The commands
have a hook of their own; extras are imported by the program itself.
"""

from pathlib import Path

PACKAGE = Path(__file__).parents[2]
KERNELS = PACKAGE / "triton_kernels"     # a link in a checkout, which rglob does not follow
ELSEWHERE = ("extras", "tools", "triton_kernels")
MODULES = [path.relative_to(PACKAGE) for folder in (PACKAGE, KERNELS) for path in folder.rglob("*.py")
           if folder is KERNELS or path.relative_to(PACKAGE).parts[0] not in ELSEWHERE]

hiddenimports = sorted({".".join([PACKAGE.name, *path.with_suffix("").parts]).removesuffix(".__init__")
                        for path in MODULES})
datas = sorted({(str(path), str(PACKAGE.name / path.parent.relative_to(PACKAGE)))
                for folder in (PACKAGE, KERNELS) for path in folder.rglob("*")
                if path.is_file() and path.suffix not in (".py", ".pyc")})
module_collection_mode = {"batch_manager.triton_kernels": "pyz+py"}     # Triton compiles kernels from their source
