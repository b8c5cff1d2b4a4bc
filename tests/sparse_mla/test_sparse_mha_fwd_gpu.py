"""The kernels of sparse_mha, gradients included, against the reference in float64 on the same GPU; other promises."""

import pytest
import torch
from sparse_mha_gpu_inputs import BACKWARD, FORWARD, OPTIONS, SHAPES, Args, check_both, make, with_results
from sparse_mla_gpu_inputs import DEVICE, make_bounds
from streams import check_replays, written_late

import dsa_ext
from dsa_ext.testing.inputs import spoil_indices

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_values(shape: tuple[int, ...], options: Args) -> None:
    args = make(*shape, **options)
    check_both({**args, "indices": spoil_indices(args["indices"], shape[2])})


@pytest.mark.parametrize("shape", [(1, 65, 3000, 5, 500), (2, 700, 300, 2, 90)])
def test_bounds(shape: tuple[int, ...]) -> None:
    check_both(make(*shape, **make_bounds(shape[2], *shape[:2])))


@pytest.mark.parametrize("seq", [130, 2100])
def test_all_keys(seq: int) -> None:
    """Every query lists all keys up to its own: attention without a mask."""
    args = make(1, seq, seq, 8, 1)
    ids = torch.arange(seq, dtype=torch.int32, device=DEVICE)
    args["indices"] = ids.expand(1, seq, -1)
    out, *_ = check_both(args)
    keys = torch.cat([args["k"], args["k_rope"][:, :, None].expand(-1, -1, 8, -1)], -1)
    q, k, v = (t.transpose(1, 2) for t in (args["q"], keys, args["v"]))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    assert (out.float() - expected.float()).square().mean() <= 2e-5 * expected.float().square().mean()


def test_order_and_repetitions_of_ids_change_nothing() -> None:
    args = make(2, 300, 400, 3, 60, causal=False)
    expected = with_results(args)
    gradients = BACKWARD(**expected)
    ids = args["indices"].sort(descending=True).values
    for other in (ids, torch.cat([ids, ids.flip(-1), torch.full_like(ids, -1)], -1)):
        got = with_results({**args, "indices": other})
        assert torch.equal(got["out"], expected["out"])
        assert all(torch.equal(a, b) for a, b in zip(BACKWARD(**got), gradients, strict=True))


def test_queries_do_not_depend_on_others() -> None:
    """A block of queries has the same results alone, and with other heads beside it."""
    args = with_results(make(1, 512, 900, 4, 200, causal=False))
    dq = BACKWARD(**args)[0]
    rows, heads = slice(128, 256), slice(1, 3)
    alone = {name: args[name][:, rows, heads] for name in ("q", "dout", "out", "lse", "dlse")}
    alone |= {name: args[name][:, :, heads] for name in ("k", "v")} | {"indices": args["indices"][:, rows]}
    forward = {name: t for name, t in (args | alone).items() if name not in ("dout", "out", "lse", "dlse")}
    for got, expected in zip(FORWARD(**forward), (args["out"], args["lse"]), strict=True):
        assert torch.equal(got, expected[:, rows, heads])
    assert torch.equal(BACKWARD(**args | alone)[0], dq[:, rows, heads])


@pytest.mark.parametrize("size", [1e3, 1e6, 1e15])
def test_huge_scores(size: float) -> None:
    args = make(1, 300, 300, 2, 100)
    args["q"] = (args["q"].float() * size).bfloat16()
    check_both(args)


@pytest.mark.gpu_memory(9)
def test_far_apart() -> None:
    """Offsets from 2^31 on: rows of q, k and v of a tensor with more elements."""
    args = make(1, 200, 200, 2, 50)
    width = (2**31 // 190) // 8 * 8
    for name in ("q", "k", "v"):
        x = args[name]
        memory = torch.empty(200 * width, dtype=torch.bfloat16, device=DEVICE)
        far = memory.as_strided(x.shape, (0, width, x.shape[3], 1))
        far.copy_(x)
        check_both({**args, name: far})
        del memory, far


def test_streams_and_graphs() -> None:
    args = with_results(make(1, 300, 300, 3, 100))
    forward = {name: args[name] for name in ("q", "k", "k_rope", "v", "indices")}
    expected = *FORWARD(**forward), *BACKWARD(**args)
    for name in ("q", "k_rope", "indices"):
        late = written_late(
            args[name], lambda t, name=name: (*FORWARD(**forward | {name: t}), *BACKWARD(**args | {name: t}))
        )
        assert all(torch.equal(a, b) for a, b in zip(late, expected, strict=True))
    check_replays(torch.cuda.Stream(), lambda: FORWARD(**forward), lambda: FORWARD(**forward))
    check_replays(torch.cuda.Stream(), lambda: BACKWARD(**args), lambda: BACKWARD(**args))


def test_it_agrees_with_sparse_mla() -> None:
    """With absorbed queries: the same attention in the other form."""
    args = make(1, 600, 600, 16, 200)
    generator = torch.Generator(DEVICE).manual_seed(1)
    latent = torch.randn(1, 600, 512, generator=generator, device=DEVICE).bfloat16()
    weights = torch.randn(2, 16, 128, 512, generator=generator, device=DEVICE).bfloat16() / 512**0.5
    k, v = (torch.einsum("btc,hdc->bthd", latent, w) for w in weights)
    out = dsa_ext.sparse_mha(args["q"], k, args["k_rope"], v, args["indices"])
    absorbed = torch.einsum("bshd,hdc->bshc", args["q"][..., :128], weights[0])
    kv = torch.cat([latent, args["k_rope"]], -1)[:, :, None]
    q = torch.cat([absorbed, args["q"][..., 128:]], -1)
    latents = dsa_ext.sparse_mla(q, kv, args["indices"][:, :, None], sm_scale=192**-0.5)
    expected = torch.einsum("bshc,hdc->bshd", latents, weights[1])
    assert (out.float() - expected.float()).square().mean() <= 1e-4 * expected.float().square().mean()


def test_a_whole_call_waits_for_nothing() -> None:
    args = with_results(make(1, 300, 300, 3, 100))
    torch.cuda.set_sync_debug_mode("error")
    try:
        BACKWARD(**args)
        FORWARD(**{name: args[name] for name in ("q", "k", "k_rope", "v", "indices")})
    finally:
        torch.cuda.set_sync_debug_mode("default")
