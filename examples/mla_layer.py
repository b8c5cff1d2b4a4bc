"""A small MLA layer with seeded weights, and an indexer made from those weights.

Nothing here is trained. Independent random weights would spread attention evenly and leave nothing to select, so two
choices give the layer the structure that training gives a real one: a byte is embedded by the n-grams that end at it,
and a head's query and key projections are tied, so that a head looks for what followed the same context earlier, and
(through RoPE) at what is near.
"""

import torch
from torch import Tensor

LATENT, ROPE = 512, 64  # one kv row: 512 latent columns, which are also the value, and 64 with RoPE
D_QK, D_V = LATENT + ROPE, LATENT
HIDDEN, HEAD_DIM = 1024, 128
SM_SCALE = (HEAD_DIM + ROPE) ** -0.5  # MLA scales by the head's own width, not by the latent's
INDEX_HEADS = (8, 16, 32, 64)  # numbers of heads that the operators of the indexer take
NGRAMS = (1, 2, 3, 5, 8)
BUCKETS = 8192
OWN = 0.3  # share of a key's own byte in its latent; the rest is the context before it
INDEX_DIM = 128  # width of an indexer head: 64 RoPE columns and 64 of the latent


def hash_ngrams(text: bytes, length: int) -> Tensor:
    """One bucket per byte: a polynomial hash of the `length` bytes that end there."""
    data = torch.tensor(list(bytes(length - 1) + text))
    value = torch.zeros(len(text), dtype=torch.int64)
    for window in range(length):
        value = (value * 1_000_003 + data[window : window + len(text)] + 1) % (2**31 - 1)
    return value % BUCKETS


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rope(x: Tensor) -> Tensor:
    """Rotates x [S, ..., 64] by its position along the first dimension."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[0], device=x.device)[:, None] * frequency
    angle = angle.view(-1, *(1,) * (x.dim() - 2), half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class MlaLayer:
    """Makes the inputs of attention from text, in the two forms of MLA.

    Absorbed, as :func:`dsa_ext.sparse_mla` takes them: q [S, H, 576], and kv [S, 576], which all heads share. Per head,
    as dense attention is computed fastest: q and k [S, H, 192] and v [S, H, 128]. Both give the same probabilities; the
    outputs differ by each head's value projection, which is tied to its key projection.
    """

    def __init__(self, heads: int, seed: int, device: torch.device) -> None:
        # Drawn on the CPU, so that one seed means the same layer on every machine.
        draw = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=draw) * rows**-0.5).to(device)

        self.tables = {n: weight(BUCKETS, HIDDEN) * BUCKETS**0.5 for n in NGRAMS}
        # Trained down-projections have a decaying spectrum; these get one: s_i ~ i^-0.25.
        basis = torch.linalg.svd(weight(HIDDEN, LATENT), full_matrices=False)
        spectrum = torch.arange(1, LATENT + 1, device=device) ** -0.25
        self.latent_directions = basis.Vh  # [512, 512], strongest direction first
        self.to_latent = basis.U * spectrum @ basis.Vh
        self.to_rope = weight(HIDDEN, ROPE)
        self.near = torch.ones(ROPE, device=device)  # shared by all q and k: what is near, matters
        self.head_keys = [weight(LATENT, HEAD_DIM) for _ in range(heads)]
        # From heads that look at content everywhere to heads that mostly look nearby.
        self.content_gain = torch.linspace(3.0, 1.0, heads).to(device)
        self.near_gain = torch.linspace(0.25, 1.0, heads).to(device)

    def _project(self, text: bytes) -> tuple[Tensor, Tensor, Tensor]:
        """What queries ask [S, 512], the latent [S, 512] and the RoPE columns [S, 64]."""
        device = self.to_latent.device
        hidden = torch.zeros(len(text), HIDDEN, device=device)
        for length, table in self.tables.items():
            hidden += table[hash_ngrams(text, length).to(device)]
        hidden = rms_norm(hidden)
        before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
        latent = rms_norm((before + OWN * hidden) @ self.to_latent)
        return rms_norm(hidden @ self.to_latent), latent, rope(self.near + 0.5 * hidden @ self.to_rope)

    def absorbed(self, text: bytes) -> tuple[Tensor, Tensor]:
        asks, latent, k_rope = self._project(text)
        q = torch.empty(len(text), len(self.head_keys), D_QK, device=latent.device)
        for head, key in enumerate(self.head_keys):
            q[:, head, :LATENT] = self.content_gain[head] * (asks @ key) @ key.T
        q[..., LATENT:] = self.near_gain[:, None] * k_rope[:, None]
        return q, torch.cat([latent, k_rope], -1)

    def per_head(self, text: bytes) -> tuple[Tensor, Tensor, Tensor]:
        asks, latent, k_rope = self._project(text)
        keys = torch.stack(self.head_keys)
        v = torch.einsum("sl,hld->shd", latent, keys)
        content = self.content_gain[:, None] * torch.einsum("sl,hld->shd", asks, keys)
        near = self.near_gain[:, None] * k_rope[:, None]
        k_rope = k_rope[:, None].expand(near.shape)
        return torch.cat([content, near], -1), torch.cat([v, k_rope], -1), v

    def indexer(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The indexer's q [S, Hi, 128], k [S, 128] and head weights [S, Hi], from the absorbed inputs of attention.

        A key keeps its RoPE columns and the 64 strongest directions of the latent. An indexer head asks what a pair of
        heads asks on average, and all pairs count alike; heads of weight 0 fill up to a number that the operators take.
        So the scores follow attention as far as keys of 128 columns can, which is what training teaches a real indexer.
        """
        strongest = self.latent_directions[: INDEX_DIM - ROPE].T
        pairs = q.unflatten(1, (-1, 2)).mean(2)
        used = pairs.shape[1]
        filled = next(heads for heads in INDEX_HEADS if heads >= used) - used
        index_q = torch.cat([pairs[..., :LATENT] @ strongest, pairs[..., LATENT:]], -1)
        return (
            torch.nn.functional.pad(index_q, (0, 0, 0, filled)),
            torch.cat([kv[:, :LATENT] @ strongest, kv[:, LATENT:]], -1),
            torch.nn.functional.pad(q.new_full((len(q), used), 1 / used), (0, filled)),
        )
