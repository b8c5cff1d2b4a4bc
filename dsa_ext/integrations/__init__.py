"""The operators in other people's models. Each module needs the library after which it is named."""
