"""Random legal calls of every operator, function and module, checked against the reference, for a given time.

    python tests/soak.py --minutes 10                       many calls
    python tests/soak.py --op sparse_mla_bwd --seed 123     one call: the one that a failure names

Each call starts with poisoned free memory and is checked with the tolerances of dsa_ext.testing. It is made a second
time: in the same way, on a side stream, or in a CUDA graph whose inputs change before it is replayed. The results must
be bitwise equal where that is promised, and no argument may have changed. The exit status is 1 if a call failed, and 2
if one did not end in time. Several processes with different seeds may share a GPU.
"""

import argparse
import hashlib
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Without it, PyTorch's matmuls are not deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor

from dsa_ext.testing.inputs import INT32_MAX
from dsa_ext.testing.progress import Progress
from dsa_ext.testing.random_calls import TARGETS, Call, make_call
from dsa_ext.testing.tolerances import bits

#: Relative number of calls, by the prefix of the target's name: checking a module takes the longest.
WEIGHTS = {"nn.": 1, "functional.": 5, "": 6}
#: Steps of the progress bar.
STEPS = 50
#: Largest storage, in bytes, that is copied to check whether a call changes it.
_COPIED = 2**28
_Args = dict[str, Any]
_Results = tuple[Tensor, ...]


class SoakError(Exception):
    """An error of a call other than a result beyond its tolerance."""


# ---- Memory


def poison(pattern: int) -> None:
    """Fills the allocator's free memory with `pattern`, so that elements that a call does not write are noticed. It
    starts with the largest blocks and ends with the smallest, so that the gaps between tensors are filled too."""
    sizes = [(2**25, 4), (2**23, 4), (2**21, 8), *((2**level, 32) for level in range(19, 8, -2))]
    blocks = [torch.empty(size // 4, dtype=torch.int32, device="cuda") for size, count in sizes for _ in range(count)]
    torch._foreach_zero_(blocks)
    torch._foreach_add_(blocks, pattern)


def whole(tensor: Tensor) -> Tensor:
    """A 1-D view of all elements of the tensor's storage."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


def in_new_memory(args: _Args) -> _Args:
    """Zeros in the same layouts. Tensors that are too large to copy are kept as they are."""

    def zeros(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.untyped_storage().nbytes() > _COPIED:
            return value
        storage = torch.empty_like(whole(value))
        storage.view(torch.uint8).zero_()
        return storage.as_strided(value.shape, value.stride(), value.storage_offset())

    return {name: zeros(value) for name, value in args.items()}


def copy_to(places: _Args, args: _Args) -> None:
    for name, place in places.items():
        if isinstance(place, Tensor) and place is not args[name]:
            whole(place).view(torch.uint8).copy_(whole(args[name]).view(torch.uint8))


# ---- Ways to make a call


def plainly(call: Call) -> _Results:
    return call.run(call.args)


def on_a_side_stream(call: Call) -> _Results:
    """On a side stream, where the inputs are written late: a kernel on another stream would read zeros."""
    late = in_new_memory(call.args)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000)
        copy_to(late, call.args)
        results = call.run(late)
    torch.cuda.current_stream().wait_stream(stream)
    stream.synchronize()
    return results


def in_a_graph(call: Call) -> _Results:
    """In a CUDA graph that is captured and replayed with zeros as inputs, then replayed with the call's inputs."""
    places = in_new_memory(call.args)
    graph = torch.cuda.CUDAGraph()
    if call.same_way:
        call.run(places)  # initializes the libraries that modules use
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = call.run(places)
    graph.replay()
    copy_to(places, call.args)
    graph.replay()
    torch.cuda.synchronize()
    return tuple(result.clone() for result in results)


Way = Callable[[Call], _Results]


def ways(call: Call, seed: int, device: torch.device) -> tuple[Way, Way]:
    """The two ways in which a call is made, chosen by its seed."""
    if device.type == "cpu":
        return plainly, plainly
    source = random.Random(f"ways {seed}")
    first: Way = source.choices((plainly, on_a_side_stream, in_a_graph), (86, 10, 4))[0]
    second: Way = source.choices((plainly, on_a_side_stream, in_a_graph), (76, 16, 8))[0]
    return first, first if call.same_way else second


# ---- One call


def make_and_judge(call: Call, seed: int, device: torch.device) -> None:
    """Makes a call in two ways. Raises AssertionError or SoakError if a result is wrong."""
    before = {name: value for name, value in call.args.items() if isinstance(value, Tensor)}
    before = {n: whole(t).clone() for n, t in before.items() if t.untyped_storage().nbytes() <= _COPIED}
    first, second = ways(call, seed, device)
    call.notes.append(f"{first.__name__}, then {second.__name__}")
    results = _make(call, first, device, INT32_MAX)
    again = _make(call, second, device, 0)
    for name, storage in before.items():
        if not torch.equal(bits(whole(call.args[name])), bits(storage)):
            raise SoakError(f"the call changed {name}")
    call.judge(results, call.args)
    for i, (a, b) in enumerate(zip(results, again, strict=True)):
        if i not in call.unordered and not torch.equal(_same_nan(a), _same_nan(b)):
            count = int((_same_nan(a) != _same_nan(b)).sum())
            raise SoakError(f"result {i} differs from call to call in {count} elements")


def _make(call: Call, way: Way, device: torch.device, pattern: int) -> _Results:
    if device.type == "cuda":
        poison(pattern)
    results = way(call)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return results


def _same_nan(x: Tensor) -> Tensor:
    x = x.detach().contiguous()
    return bits(x.masked_fill(x.isnan(), torch.nan) if x.is_floating_point() and x.element_size() > 1 else x)


# ---- Many calls


@dataclass
class Soak:
    device: torch.device
    seconds_per_call: float
    calls: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    too_large: Counter[str] = field(default_factory=Counter)

    def call(self, target: str, seed: int) -> None:
        """Makes one call, counts it, and prints its errors."""
        begin = time.monotonic()
        self.what = f"{target}: its arguments are made"
        self.command = f"python tests/soak.py --op {target} --seed {seed} --device {self.device.type}"
        try:
            with self._time_limit():
                call = make_call(target, seed, self.device)
                self.what = call.describe()
                make_and_judge(call, seed, self.device)
        except (AssertionError, SoakError) as error:
            self._failed(target, str(error))
        except Exception as error:
            if "out of memory" in str(error):
                self.too_large[target] += 1
                torch.cuda.empty_cache()
            else:
                where = traceback.extract_tb(error.__traceback__)[-1]
                self._failed(target, f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")
                self._end_if_broken()
        self.calls[target] += 1
        self.seconds[target] += time.monotonic() - begin

    @contextmanager
    def _time_limit(self) -> Iterator[None]:
        timer = threading.Timer(self.seconds_per_call, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self) -> None:
        """Ends the process: nothing else stops a kernel that hangs."""
        limit = f"more than {self.seconds_per_call:g} s"
        print(f"\nHANGS, {limit}: {self.what}\n  repeat: {self.command}", flush=True)
        os._exit(2)

    def _failed(self, target: str, error: str) -> None:
        self.failures[target] += 1
        text = error.split("\nException raised from")[0].strip().replace("\n", "\n  ")[:2000]
        print(f"\nFAILED {self.what}\n  {text}\n  repeat: {self.command}", flush=True)

    def _end_if_broken(self) -> None:
        """Ends the process after an error such as an illegal address, after which it cannot use the GPU any more."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"the GPU cannot be used any more: {str(error).splitlines()[0]}", flush=True)
            self.report()
            sys.stderr.flush()
            os._exit(1)

    def report(self) -> None:
        print(f"\n{'target':32}   calls  failures  too large  ms a call")
        for name in filter(self.calls.get, TARGETS):
            ms_per_call = 1e3 * self.seconds[name] / self.calls[name]
            print(f"{name:32} {self._counts(name)} {ms_per_call:10.1f}")
        print(f"{'all':32} {self._counts()}", flush=True)

    def _counts(self, *names: str) -> str:
        calls, failures, too_large = (
            sum(counter[name] for name in names or counter) for counter in (self.calls, self.failures, self.too_large)
        )
        return f"{calls:7} {failures:9} {too_large:10}"


def seed_of(base: int, count: int) -> int:
    """The seed of call number `count`."""
    digest = hashlib.blake2b(f"{base} {count}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def pick(seed: int, names: list[str]) -> str:
    weights = [next(weight for start, weight in WEIGHTS.items() if name.startswith(start)) for name in names]
    return random.Random(seed).choices(names, weights)[0]


def soak(soaked: Soak, minutes: float, base: int, names: list[str]) -> None:
    begin, end, steps = time.monotonic(), time.monotonic() + 60 * minutes, 0
    progress = Progress(STEPS)
    count = 0
    while time.monotonic() < end or count == 0:
        seed = seed_of(base, count)
        soaked.call(pick(seed, names), seed)
        count += 1
        done = STEPS * min(1.0, (time.monotonic() - begin) / max(1e-9, 60 * minutes))
        while steps < int(done):
            steps += 1
            progress.step(f"{count} calls, {soaked.failures.total()} failures")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="how long; without it one call is made, that of --op and --seed")
    parser.add_argument("--op", choices=TARGETS, metavar="NAME", help="only this target: " + ", ".join(TARGETS))
    parser.add_argument("--seed", type=int, help="of all calls, or of the one; by default a new one each time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds-per-call", type=float, default=60, help="after which a call counts as one that hangs"
    )
    parser.add_argument("--memory", type=float, default=6, help="GB of the GPU to use; what needs more is left out")
    args = parser.parse_args(argv)
    if args.minutes is None and (args.op is None or args.seed is None):
        parser.error("--minutes, or --op and --seed of one call")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; use --device cpu")
    soaked = Soak(torch.device(args.device), args.seconds_per_call)
    if args.device == "cuda":
        share = args.memory * 1e9 / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    if args.minutes is None:
        soaked.call(args.op, args.seed)
        print(soaked.what)
    else:
        base = args.seed if args.seed is not None else int.from_bytes(os.urandom(4), "big")
        print(f"seed {base}", flush=True)
        soak(soaked, args.minutes, base, list(TARGETS) if args.op is None else [args.op])
    soaked.report()
    return 1 if soaked.failures else 0


if __name__ == "__main__":
    sys.exit(main())
