"""Modes of PyTorch in which modules may be used, on the CPU: autocast and meta devices; derivatives of their parts."""

import pytest
import torch
from modes import INDEXER, MODULES, assert_same, autocast, make_module, results_of, total
from torch import Tensor
from torch.autograd import forward_ad

from dsa_ext.nn import BlockSparseAttention, FP8Linear, HyperConnection, LightningIndexer, apply_rope
from dsa_ext.nn.absorption import Rope, absorbed_queries
from dsa_ext.nn.heads import multiply_heads
from dsa_ext.nn.rotary import rope_tables

all_modules = pytest.mark.parametrize("name", MODULES)


@all_modules
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_modules_under_autocast(name: str, dtype: torch.dtype) -> None:
    """A module in bf16, as it is trained on a GPU, and one with fp32 weights."""
    module = make_module(name)
    expected = results_of(module)
    if not isinstance(module, FP8Linear):
        module.to(dtype)
    with autocast():
        got = results_of(module, dtype)
    for a, b in zip(got, expected, strict=True):
        assert (a.float() - b.float()).norm() <= 0.1 * b.float().norm()
    if isinstance(module, FP8Linear):
        return
    total(got).backward()
    for parameter_name, parameter in module.named_parameters():
        if parameter.grad is None:
            assert name == "SparseMLA, dense", parameter_name
            assert parameter_name.startswith("indexer."), parameter_name
        else:
            assert parameter.grad.dtype == dtype, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name


@all_modules
def test_modules_under_autocast_in_float16(name: str) -> None:
    """An error that says what autocast must use, except where it casts nothing."""
    module = make_module(name)
    with torch.autocast("cpu", torch.float16):
        if isinstance(module, FP8Linear):
            results_of(module)
            return
        kind = type(module).__name__
        with pytest.raises(RuntimeError, match=f"^{kind}: autocast must use bfloat16, got float16$"):
            results_of(module)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith(("HyperConnection", "FP8Linear"))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_inputs_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    """An error that names the module and both dtypes."""
    module = make_module(name)
    message = rf"{type(module).__name__}: x must be float32 like the parameters, got {dtype} \[2, 70, 48\]"
    with pytest.raises(ValueError, match=message.replace("torch.", "")):
        results_of(module, dtype)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith(("HyperConnection", "FP8Linear"))])
def test_other_inputs(name: str) -> None:
    """Errors that name the module, also for what autocast does not cast."""
    module = make_module(name)
    kind = type(module).__name__
    x = torch.randn(2, 70, 48)
    others = (None,) if "Indexer" in name else ()
    for wrong, got in ((x[0], r"float32 \[70, 48\]"), (x[..., :40], r"float32 \[2, 70, 40\]"), (None, "NoneType")):
        with pytest.raises(ValueError, match=f"^{kind}: x must be .*, got {got}$"):
            module(wrong, *others)
    for wrong in (x.double(), x.long()):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(ValueError, match=f"^{kind}: x must be float32 or bfloat16 like the parameters, got .*64 "),
        ):
            module(wrong, *others)


def test_a_cache_under_autocast() -> None:
    module = BlockSparseAttention(48, 2, head_dim=64)
    x = torch.randn(1, 128, 48)
    with torch.no_grad(), autocast():
        cache = module.make_cache(1, 128)
        assert cache.tokens()[0].dtype == torch.bfloat16
        first, second = (module(part, cache=cache) for part in x.chunk(2, 1))
        torch.testing.assert_close(second, module(x)[:, 64:], rtol=0.1, atol=0.1)
        assert first.shape == second.shape


def on_meta(name: str) -> torch.nn.Module:
    with torch.device("meta"):
        return MODULES[name]()


def poison(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype).fill_(127)


@all_modules
@pytest.mark.parametrize("assign", [False, True])
def test_loading_after_a_meta_device(name: str, assign: bool) -> None:
    expected, module = make_module(name), on_meta(name)
    if not assign:
        module.to_empty(device="cpu")
        poison(module)
    module.load_state_dict(expected.state_dict(), strict=True, assign=assign)
    assert_same(results_of(module), results_of(expected))


def test_what_checkpoints_hold() -> None:
    """Constants are not saved, so that checkpoints of every version load with strict=True."""
    plain, rotated = (LightningIndexer(48, 48, **INDEXER, hadamard=hadamard) for hadamard in (False, True))
    assert plain.state_dict().keys() == rotated.state_dict().keys()
    assert not [*rotated.buffers(), *make_module("SparseMLA, sparse").buffers()]


@all_modules
def test_parameters_are_reset_after_a_meta_device(name: str) -> None:
    """Each module resets its own parameters, in any order: constants are as in a new module, random values in range."""
    if name == "FP8Linear":
        pytest.skip("its weight is made of another layer's")
    expected, another = make_module(name), MODULES[name]()
    module = on_meta(name).to_empty(device="cpu")
    for backwards in (False, True):
        poison(module)
        for part in list(module.modules())[:: -1 if backwards else 1]:
            if [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
                part.reset_parameters()
        parameters = (made.parameters() for made in (module, expected, another))
        for got, wanted, other in zip(*parameters, strict=True):
            if torch.equal(wanted, other):
                assert torch.equal(got, wanted)
            else:
                assert got.abs().max() <= 1.5 * wanted.abs().max()


def make_input(module: torch.nn.Module, *several: int) -> Tensor:
    shape = {HyperConnection: (1, 5, 4, 128), FP8Linear: (1, 5, 128)}.get(type(module), (1, 5, 48))
    return torch.randn(*several, *shape, generator=torch.Generator().manual_seed(1))


def floats(module: torch.nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """The floating-point results for x."""
    results = module(x, x) if isinstance(module, LightningIndexer) else module(x)
    results = results if isinstance(results, tuple) else (results,)
    return tuple(result for result in results if result is not None and result.is_floating_point())


@all_modules
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_of_modules_is_a_loop(name: str) -> None:
    module = make_module(name)
    several = make_input(module, 2).requires_grad_(name != "FP8Linear")
    got = torch.vmap(lambda x: floats(module, x))(several)
    expected = tuple(map(torch.stack, zip(*(floats(module, x) for x in several), strict=True)))
    torch.testing.assert_close(got, expected)
    if several.requires_grad:
        torch.testing.assert_close(*(torch.autograd.grad(total(results), several) for results in (got, expected)))


@pytest.mark.parametrize("name", [name for name in MODULES if name != "FP8Linear"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batched_gradients_of_modules(name: str) -> None:
    """They are those of one at a time, or a clear error where a backward pass writes to its memory."""
    module = make_module(name)
    x = make_input(module).requires_grad_()
    result = floats(module, x)[0]
    gradients = torch.randn(3, *result.shape, generator=torch.Generator().manual_seed(2))
    if name.startswith(("SparseMLA", "LightningIndexer")):
        with pytest.raises(RuntimeError, match=r"^(SparseMLA|apply_rope): batched gradients .* are not supported"):
            torch.autograd.grad(result, x, gradients, is_grads_batched=True)
        return
    expected = torch.stack([torch.autograd.grad(result, x, g, retain_graph=True)[0] for g in gradients])
    torch.testing.assert_close(torch.autograd.grad(result, x, gradients, is_grads_batched=True)[0], expected)


#: Modules without a gradient, and one that runs on torch's attention.
_NOT_REFUSED = ("FP8Linear", "LightningIndexer", "SparseMLA, dense")


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith(_NOT_REFUSED)])
def test_gradient_transforms_of_modules_name_an_operator(name: str) -> None:
    module = make_module(name)
    x = make_input(module)

    def loss(x: Tensor) -> Tensor:
        return floats(module, x)[0].sum()

    with pytest.raises(RuntimeError, match=r"^dsa::.*: the gradient transforms of torch.func are not supported"):
        torch.func.grad(loss)(x)
    with pytest.raises(RuntimeError, match=r"^dsa::.*: forward-mode differentiation \(jvp\) is not supported"):
        torch.func.jvp(loss, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"^dsa::.*: forward-mode differentiation"):
        loss(forward_ad.make_dual(x, x))


def test_gradient_transforms_of_the_dense_phase() -> None:
    module = make_module("SparseMLA, dense")
    x = make_input(module).requires_grad_()
    expected = torch.autograd.grad(module(x).out.square().sum(), x)[0]
    torch.testing.assert_close(torch.func.grad(lambda x: module(x).out.square().sum())(x), expected)


def test_transforms_of_rope() -> None:
    """It is linear in x, and no operator: all transforms work."""
    x, tangent = torch.randn(2, 2, 3, 4, 6, dtype=torch.float64)

    def rotate(x: Tensor) -> Tensor:
        return apply_rope(x, torch.arange(3) + 5, columns=4)

    assert torch.equal(torch.vmap(rotate)(x[:, None])[:, 0], rotate(x))
    value, linear = torch.func.linearize(rotate, x)  # type: ignore[no-untyped-call]
    torch.testing.assert_close((value, linear(tangent)), (rotate(x), rotate(tangent)))
    torch.testing.assert_close(torch.func.jvp(rotate, (x,), (tangent,)), (rotate(x), rotate(tangent)))
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(rotate(leaf).square().sum(), leaf)[0]
    torch.testing.assert_close(torch.func.grad(lambda x: rotate(x).square().sum())(x), expected)


@pytest.mark.parametrize("function", ["rope", "multiply_heads", "absorbed_queries"])
def test_second_derivatives_of_parts(function: str) -> None:
    """The parts of modules have second derivatives, as the matmuls that they replace."""
    generator = torch.Generator().manual_seed(0)
    x, key_weight, weights = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((2, 3, 2, 6), (2, 4, 5), (2, 6, 3))
    )
    cos, sin = rope_tables(x, torch.arange(3), 100.0, 2)
    if function == "rope":
        torch.autograd.gradgradcheck(lambda x: apply_rope(x, torch.arange(3)), x)
    elif function == "multiply_heads":
        torch.autograd.gradgradcheck(multiply_heads, (x, weights))
    else:
        torch.autograd.gradgradcheck(lambda x, w: absorbed_queries(x, w, Rope(cos, sin, False)), (x, key_weight))
