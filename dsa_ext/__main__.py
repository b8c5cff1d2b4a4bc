"""`python -m dsa_ext` prints what is installed and what works here."""

from dsa_ext import build_info

if __name__ == "__main__":
    for name, value in build_info().items():
        print(f"{name + ':':<16}{value}")
