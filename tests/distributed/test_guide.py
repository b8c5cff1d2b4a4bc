"""The code of the guide to several GPUs, in one process on the CPU."""

import re
import socket
import sys
from pathlib import Path

from commands import run
from conftest import ROOT

GUIDE = (ROOT / "docs/guide/several-gpus.md").read_text()
FIRST, TRAIN, SHARD, SAVE = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
#: What other blocks begin with: the guide says so.
SETUP = FIRST[: FIRST.index("torch.manual_seed")]


def printed(*blocks: str, folder: Path) -> list[str]:
    with socket.create_server(("localhost", 0)) as server:  # scripts of several processes must not share a port
        port = str(server.getsockname()[1])
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MASTER_PORT": port}
    return run(sys.executable, "-c", "\n".join(blocks), cwd=folder, **environment).split()


def test_first_script(tmp_path: Path) -> None:
    assert float(printed(FIRST, folder=tmp_path)[-1]) > 0


def test_training_step_and_checkpoint(tmp_path: Path) -> None:
    model, optimizer = TRAIN[: TRAIN.index("losses = train_step")].split("kinds =", 1)
    optimizer = f"kinds ={optimizer}"
    step = "print(*train_step(torch.arange(258).view(2, 129) % 256))"
    forget = "model.load_state_dict({name: 0 * value for name, value in model.state_dict().items()})"
    save, load = SAVE.split("state = ", 1)
    end = "dist.destroy_process_group()"
    plain = printed(SETUP, model, optimizer, step, step, end, folder=tmp_path)
    sharded = printed(SETUP, model, SHARD, optimizer, step, save, forget, f"state = {load}", step, end, folder=tmp_path)
    assert len(plain) == 4
    assert float(plain[2]) < float(plain[0])
    assert all(abs(float(a) / float(b) - 1) < 0.02 for a, b in zip(plain, sharded, strict=True)), (plain, sharded)
