"""Lets the wheel's library load with glibc 2.28 and later, although it is linked on a newer system.

glibc 2.34 moved the functions of libpthread, libdl and librt into libc and gave them a new symbol version. A library
that is linked there needs glibc 2.34, only because of that version: the functions are the same, and every later glibc
still provides the old versions for older programs. `write_libraries` writes libraries without code that list these
functions under the old versions. The linker finds them first and records the old versions; they are never loaded.

Of what the kernels' library uses, one variable is new: __libc_single_threaded (glibc 2.32), by which libstdc++ avoids
atomic reference counts in programs with a single thread. The library gets its own copy, which says "several threads".
"""

import platform
import re
import subprocess
from pathlib import Path

OLDEST = (2, 28)
MOVED = {  # in glibc 2.34, from these libraries into libc.so.6
    "pthread": ("libpthread.so.0", r"(pthread|sem)_\w+"),
    "dl": ("libdl.so.2", r"dl(open|mopen|close|sym|vsym|error|addr|info|iterate_phdr)"),
    "rt": ("librt.so.1", r"shm_\w+"),
}
SINGLE_THREADED = """
.section .rodata
.globl __libc_single_threaded
.hidden __libc_single_threaded
.type __libc_single_threaded, @object
.size __libc_single_threaded, 1
__libc_single_threaded: .byte 0
.section .note.GNU-stack,"",@progbits
"""


def versions_in_libc() -> dict[str, dict[tuple[int, ...], bool]]:
    """Of each function in this system's libc.so.6: its versions, and whether new programs get that one."""
    libc = subprocess.check_output(["gcc", "-print-file-name=libc.so.6"], text=True).strip()
    symbols = subprocess.check_output(["readelf", "--dyn-syms", "-W", libc], text=True)
    versions: dict[str, dict[tuple[int, ...], bool]] = {}
    for name, sign, version in re.findall(r" (\w+)(@@?)GLIBC_([\d.]+)\s*$", symbols, flags=re.MULTILINE):
        versions.setdefault(name, {})[tuple(map(int, version.split(".")))] = sign == "@@"
    return versions


def moved_functions(pattern: str) -> dict[tuple[int, ...], list[str]]:
    """Names by their newest version that OLDEST has, of the functions whose current version is newer."""
    moved: dict[tuple[int, ...], list[str]] = {}
    for name, versions in sorted(versions_in_libc().items()):
        current = max(versions, key=lambda version: (versions[version], version))
        old = [version for version in versions if version <= OLDEST]
        if re.fullmatch(pattern, name) and current > OLDEST and old:
            moved.setdefault(max(old), []).append(name)
    return moved


def write_libraries(folder: Path) -> list[str]:
    """Writes the libraries; returns the linker's arguments, none where glibc is as old as OLDEST."""
    glibc = platform.libc_ver()[1]
    if tuple(map(int, glibc.split("."))) <= OLDEST:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for library, (file, pattern) in MOVED.items():
        functions = moved_functions(pattern)
        names = [name for group in functions.values() for name in group]
        code = "".join(f".globl {name}\n.type {name}, @function\n{name}:\n" for name in names)
        source, script = folder / f"{library}.s", folder / f"{library}.map"
        source.write_text(f'.text\n{code}.section .note.GNU-stack,"",@progbits\n')
        blocks = [
            f"GLIBC_{'.'.join(map(str, version))} {{ global: {'; '.join(group)}; }};"
            for version, group in sorted(functions.items())
        ]
        script.write_text("\n".join(blocks) + "\n")
        options = ["-shared", "-nostdlib", f"-Wl,-soname,{file}", f"-Wl,--version-script,{script}"]
        subprocess.check_call(["gcc", *options, "-o", folder / f"lib{library}.so", source])
    source, single_threaded = folder / "single_threaded.s", folder / "single_threaded.o"
    source.write_text(SINGLE_THREADED)
    subprocess.check_call(["gcc", "-c", "-o", single_threaded, source])
    return [f"-L{folder}", str(single_threaded)]
