"""The functions of other libraries, with their signatures and conventions, on the operators of this package.

`python -m dsa_ext.compat install-shim DIR` writes packages `flash_mla` and `deep_gemm` that export them to a folder.
"""
