"""Hyper-connections."""

from dsa_ext.testing.calls import ORDINARY
from sanitized.calls import checked

# (B, S, n, D): one token, clusters of 2 to 16 CTAs, several tiles per CTA.
MHC = ((1, 1, 2, 128), (1, 40, 4, 640), (2, 9, 4, 1920), (1, 17, 4, 3968), (1, 1100, 4, 128))


def mhc_pre_fwd() -> None:
    for batch, length, streams, columns in MHC:
        args = ORDINARY["mhc_pre_fwd"](batch * length, streams, columns)
        args["x"] = args["x"].view(batch, length, streams, columns)
        checked("mhc_pre_fwd", **args)


def mhc_pre_bwd() -> None:
    for batch, length, streams, columns in MHC:
        checked("mhc_pre_bwd", **ORDINARY["mhc_pre_bwd"](batch * length, streams, columns))


def mhc_post() -> None:
    for batch, length, streams, columns in MHC:
        sizes = (batch * length, streams, columns)
        checked("mhc_post_fwd", **ORDINARY["mhc_post_fwd"](*sizes))
        checked("mhc_post_bwd", **ORDINARY["mhc_post_bwd"](*sizes), iterations=3)
