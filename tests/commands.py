"""Programs that tests of the compiled library run."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT

from dsa_ext import _native


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment}, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str) -> str:
    """A program of the binary utilities or of the CUDA toolkit."""
    folders = [os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    folders.append(f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin")
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


needs_library = pytest.mark.skipif(_native.library is None, reason=f"no kernels: {_native.missing_reason}")
