"""`python -m dsa_ext` prints the installed versions and which implementations are available on this machine."""

from dsa_ext import build_info

if __name__ == "__main__":
    for name, value in build_info().items():
        print(f"{name + ':':<16}{value}")
