"""Memory layouts of an operator's arguments, for tests that they change no result."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import dsa_ext
from dsa_ext.testing.calls import ORDINARY

Args = dict[str, Any]

#: Arguments that all sequences share.
_SHARED = {"kv_block_size", "phi", "alpha", "bias", "gamma", "attn_sink"}
_PACKED = ("indexer", "topk", "act", "fp8")
#: Smaller sizes for operators that are slow on the CPU with the ordinary ones.
_SIZES = {
    "attn_dist": {"seq": 3, "s_kv": 20, "topk": 9},
    "sparse_mla_fwd": {"seq": 3, "s_kv": 20, "topk": 9},
    "sparse_mla_max_fwd": {"seq": 3, "s_kv": 20, "topk": 9},
    "sparse_mla_bwd": {"seq": 3, "s_kv": 20, "topk": 9},
    "block_sparse_attn_fwd": {"n_q": 70, "n_kv": 70},
    "block_sparse_attn_bwd": {"n_q": 70, "n_kv": 70},
    "coarse_attn_fwd": {"n_kv": 9},
}


def ordinary(op: str, batch: int, device: str = "cpu") -> Args:
    """An ordinary call, of two equal sequences where `batch` is 2."""
    args = ORDINARY[op](**_SIZES.get(op, {}))
    for name, value in args.items():
        if isinstance(value, Tensor):
            alone = name not in _SHARED and not op.startswith(_PACKED) and value.shape[0] == 1
            args[name] = (torch.cat([value] * batch) if alone else value).to(device)
    return args


def call(op: str, args: Args) -> tuple[Tensor, ...]:
    results = getattr(torch.ops.dsa, op)(**args)
    return results if isinstance(results, tuple) else (results,)


def copied(x: Tensor, strides: list[int], offset: int = 0) -> Tensor:
    """A copy of x with these strides, which must not overlap."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    view = x.new_empty(offset + last + 1).as_strided(x.shape, strides, offset)
    view.copy_(x)
    return view


def permuted(x: Tensor, order: tuple[int, ...], gap: int = 0) -> Tensor:
    """A copy of x with its dimensions in this order in memory, the outermost first. With a gap, every dimension is
    longer in memory: the innermost by 16 * gap elements, the others by `gap` of their own elements."""
    strides, stride = [0] * x.dim(), 1
    for place, dim in enumerate(reversed(order)):
        strides[dim] = stride
        stride *= max(1, x.shape[dim]) + (gap * 16 if place == 0 else gap)
    return copied(x, strides, 16 * gap)


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views and copies of x in many layouts, by name. Expanded ones have other values: one element is repeated."""
    dims = tuple(range(x.dim()))
    for order in itertools.permutations(dims):
        yield f"order {order}", permuted(x, order)
    for order in (dims, (*reversed(dims[:-1]), dims[-1]), dims[::-1]):
        yield f"order {order} with gaps", permuted(x, order, 1)
    for dim in dims:
        yield f"expanded along {dim}", x.narrow(dim, 0, 1).expand(x.shape)
        if x.shape[dim] == 1:
            for stride in (0, 1, 3, 12345):
                strides = list(x.stride())
                strides[dim] = stride
                yield f"stride {stride} along {dim}", x.as_strided(x.shape, strides)
    if x.dim() > 2:
        yield "expanded along 0 and 1", x[:1, :1].expand(x.shape)


def torn(x: Tensor) -> Tensor:
    """x [1, H, N, D], the same for all N, with strides from which torch.empty_like makes a result whose rows are not
    dense: the dimension of size 1 puts the last dimension outside of the expanded one."""
    return x[:, :, :1].expand(x.shape).as_strided(x.shape, (1, x.stride(1), 0, 1))


def calls_in_layouts(op: str, batch: int, device: str = "cpu") -> Iterator[tuple[str, Args]]:
    """Calls in which one argument has another layout, then calls in which all arguments of one rank have the same."""
    base = ordinary(op, batch, device)
    tensors = {name: value for name, value in base.items() if isinstance(value, Tensor) and value.numel() > 0}
    for name, value in tensors.items():
        for layout, other in layouts(value):
            yield f"{name} {layout}", base | {name: other}
        if name in ("q", "k", "v") and value.dim() == 4 and len(value) == 1 and "kv" not in base:
            yield f"{name} torn", base | {name: torn(value)}
    for rank in {value.dim() for value in tensors.values()}:
        names = [name for name, value in tensors.items() if value.dim() == rank]
        for order in itertools.permutations(range(rank)):
            if len(names) > 1:
                yield f"{names} order {order}", base | {name: permuted(tensors[name], order) for name in names}


def dense(args: Args) -> Args:
    return {n: v.clone(memory_format=torch.contiguous_format) if isinstance(v, Tensor) else v for n, v in args.items()}


def expected_of(op: str, args: Args, base: Args, base_results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Results of dense copies of the arguments: `base_results` when their values are those of `base`."""
    same = all(torch.equal(args[name], value) for name, value in base.items() if isinstance(value, Tensor))
    return base_results if same else call(op, dense(args))


def form(x: Tensor) -> tuple[Any, ...]:
    """dtype, sizes and the strides that matter."""
    strides = tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
    return x.dtype, tuple(x.shape), strides if x.numel() > 0 else ()


#: How models often make q, k and v [B, H, N, D] from an input [B, N, H, D].
ORIGINS: dict[str, Callable[[Tensor], Tensor]] = {
    "projected": lambda x: x.transpose(1, 2),
    "sequence first": lambda x: x.transpose(0, 1).contiguous().permute(1, 2, 0, 3),
    "one head for all": lambda x: x[:, :, :1].transpose(1, 2).expand(-1, x.shape[2], -1, -1),
    "one sequence for all": lambda x: x[:1].transpose(1, 2).expand(len(x), -1, -1, -1),
    "a slice": lambda x: torch.cat([x, x], 2).transpose(1, 2)[:, : x.shape[2]],
}


def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Both branches of block-sparse attention with every block listed, and their fusion: [B, H, N, D]."""
    blocks = -(-q.shape[2] // 64)
    ids = torch.arange(blocks, dtype=torch.int32, device=q.device).expand(*q.shape[:2], blocks, blocks)
    fine = dsa_ext.block_sparse_attn(q, k, v, ids, torch.full_like(ids[..., 0], blocks))
    coarse, _ = dsa_ext.coarse_attn(q, k, v)
    return dsa_ext.gated_fusion(fine, coarse, gate)


def check_compiled(origin: str, device: str, dtype: torch.dtype, *, within: bool, **options: Any) -> None:
    """A compiled step equals the eager one. The layouts are made inside the compiled function, or before it."""
    torch._dynamo.reset()
    arrange = ORIGINS[origin]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 80, 3, 64, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]
    gate = torch.randn(2, 80, 3, generator=generator).to(device).requires_grad_()

    def step(*tensors: Tensor) -> Tensor:
        q, k, v, gate = (arrange(t[..., None])[..., 0] if t.dim() == 3 else arrange(t) for t in tensors)
        return attend(q, k, v, gate)

    if within:
        results = [function(*inputs, gate) for function in (step, torch.compile(step, fullgraph=True, **options))]
    else:
        arranged = [arrange(x) for x in inputs]
        args = (*arranged, arrange(gate[..., None])[..., 0])
        results = [function(*args) for function in (attend, torch.compile(attend, fullgraph=True, **options))]
    assert form(results[0]) == form(results[1])
    upstream = torch.randn(results[0].shape, generator=generator).to(results[0])
    eager, compiled = ((out.detach(), *torch.autograd.grad(out, [*inputs, gate], upstream)) for out in results)
    # The compiler chooses where sums over expanded dimensions are rounded.
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-8 * float(b.abs().max()))
