"""The checks of `make gpu-check`, and tests of them."""
